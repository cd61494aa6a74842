"""What a user's process does with the hub: load every split of some sets by name, and say what came. Run by
tests/2_environment/test_datasets.py, with HF_ENDPOINT and HF_HOME set.

    python tests/tools/hub_client.py OUT.json NAME...

FinQA's authors are taken to be at the same server. Writes {name: {split: [[id, text, answers, meta], ...] or an
error's type and message}}.
"""
import dataclasses
import json
import os
import sys
from pathlib import Path

from huggingface_hub import constants

from credit_rl.benchmarks import BENCHMARKS
from credit_rl.datasets import load_questions

constants.DOWNLOAD_CHUNK_SIZE = 64    # bytes written at once: the files are smaller than the usual 10 MB

finqa = BENCHMARKS['finqa']
here = os.environ['HF_ENDPOINT'] + '/datasets/{repository}/resolve/{commit}/dataset/%s.json'
BENCHMARKS['finqa'] = dataclasses.replace(finqa, hub_splits={split: here % split for split in finqa.hub_splits})


def load(name, split):
    try: return [[q.id, q.text, list(q.answers), q.meta] for q in load_questions(name, split=split)]
    except Exception as e: return [type(e).__name__, str(e)]


out, names = Path(sys.argv[1]), sys.argv[2:]
out.write_text(
    json.dumps({name: {split: load(name, split) for split in BENCHMARKS[name].hub_splits} for name in names}))
