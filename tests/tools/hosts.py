"""A host of two that meet at an endpoint, with a rank each, which then wait, fail or end; not a test file. As a
program, `python -m tests.tools.hosts FOLDER ENDPOINT WHAT [DATA]` is one host's command, without what a run imports."""
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from credit_rl.launch import is_rank, join_ranks, keep_traceback, launch, launch_command, rank_environment, speak

if __name__ == '__main__':
    folder, endpoint, what, *data = sys.argv[1:]
    result = Path(folder) / 'summary.json'
    if not is_rank():
        where = (2, 2, endpoint)
        launch(launch_command('tests.tools.hosts', sys.argv[1:], *where, folder), folder, result, hosts=2,
               environment=rank_environment(*where))
        print('all is well', flush=True)
    else:
        with keep_traceback(folder, int(os.environ['RANK'])):
            ranks = join_ranks(2, SimpleNamespace(run=folder, path=data[0] if data else None, what=what))
            speak(f'rank {ranks.rank} is here')
            if what == 'wait': time.sleep(600)
            if what == 'fail' and ranks.rank == 1: raise ZeroDivisionError('division by zero')
            ranks.wait()
            if ranks.first: result.write_text('{}')
