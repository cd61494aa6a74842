"""Two ranks that meet and then wait; not a test file. As a program, `python -m tests.tools.ranks FOLDER` asks for them
as a run does, without what a run imports. `python -m tests.tools.ranks FOLDER RUNS.json` asks for two that make whole
runs, a list of their settings, one after the other."""
import json
import sys
import time
from pathlib import Path

from credit_rl.launch import is_rank, join_ranks, launch, launch_command, speak

if __name__ == '__main__':
    folder, *several = map(Path, sys.argv[1:])
    if not is_rank(): launch(launch_command('tests.tools.ranks', sys.argv[1:], 2), folder, folder / 'summary.json')
    elif several:
        from credit_rl.train import train
        for settings in json.loads(several[0].read_text()): train(settings)
        (folder / 'summary.json').touch()
    else:
        ranks = join_ranks(2)
        ranks.wait()
        if ranks.first: speak('all are here')
        time.sleep(600)
