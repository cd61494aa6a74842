"What git keeps below a folder: pages and tests look at that, and leave a reader's own files alone."
import subprocess
from pathlib import Path


def kept(
    root,     # top of the repository
    pattern,  # from there, as `Path.glob` takes it
):
    "The paths that match and that git keeps, sorted; all that match where `root` is no clone: list of Path."
    root = Path(root)
    found = sorted(root.glob(pattern))
    if not (root / '.git').exists(): return found
    names = subprocess.check_output(['git', 'ls-files', '-z'], cwd=root, text=True).split('\0')
    return sorted({*found} & {root / name for name in names})
