"""The package: name, version, requirements and description come from settings.ini, licence and classifiers from here."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

here = Path(__file__).resolve().parent
settings = ConfigParser(delimiters=['='], interpolation=None)
settings.read(here / 'settings.ini', encoding='utf-8')
cfg = settings['DEFAULT']

extras = {key.removesuffix('_requirements'): cfg[key].split() for key in cfg if key.endswith('_requirements')}
extras['all'] = sorted({r for name in cfg['all_extras'].split() for r in extras[name]})
readme = here / 'README.md'

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=readme.read_text(encoding='utf-8') if readme.exists() else cfg['description'],
    long_description_content_type='text/markdown',
    author=cfg['author'],
    author_email=cfg['author_email'],
    license='Apache-2.0',
    url=cfg['git_url'],
    keywords=cfg['keywords'].split(),
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Science/Research', 'Programming Language :: Python :: 3'],
    packages=[cfg['lib_path'], f"{cfg['lib_path']}.studies"],
    package_data={cfg['lib_path']: ['view.html', 'view.css']},   # what 72_view shows pages by
    include_package_data=False,
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg['requirements'].split(),
    extras_require=extras,
    entry_points={
        'console_scripts': ['credit-rl = credit_rl.command:main'],
        # in a clone papermill makes a new run's folder, and keeps a finished notebook; it chooses by how a path begins
        'papermill.io': ['runs/ = credit_rl.runlog:RunPaths', './runs/ = credit_rl.runlog:RunPaths'],
    },
    zip_safe=False,
)
