"""Two ranks that meet and then wait; not a test file. As a program, `python -m tests.ranks FOLDER` asks for them as a
run does, without what a run imports."""
import sys
import time
from pathlib import Path

from credit_rl.launch import is_rank, join_ranks, launch, launch_command, speak

if __name__ == '__main__':
    if is_rank():
        ranks = join_ranks(2)
        ranks.wait()
        if ranks.first: speak('all are here')
        time.sleep(600)
    else:
        folder = Path(sys.argv[1])
        launch(launch_command('tests.ranks', sys.argv[1:], 2), folder, folder / 'summary.json')
