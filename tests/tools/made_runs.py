"""Run folders as the program writes them, made in a moment: of trainings, and of evaluations."""
import json

from credit_rl.runlog import RunLog
from credit_rl.trajectory import example_group, to_json

SEVEN = ('nq', 'triviaqa', 'popqa', 'hotpotqa', '2wikimultihopqa', 'musique', 'bamboogle')
BIG, SMALL = 'Qwen/Qwen2.5-7B-Instruct', 'Qwen/Qwen2.5-3B-Instruct'


def made(folder, method='tips', model=BIG, seed=0, em=.5, steps=2, played=0, **settings):
    "A finished run of training, as one writes it: its settings, two steps, its summary, so many kept rollouts."
    log = RunLog(folder)
    log.write_params({'method': method, 'model': model, 'seed': seed, 'steps': steps, 'options': {}, **settings})
    for step in range(1, steps + 1): log.metrics(step, em=em, tokens=10. * step, seconds_step=4., dev_em=em)
    if played: log.turns(1, [{'kind': 'train', 'trajectory': to_json(t), 'reward': float(i == 0)}
                             for i, t in enumerate(example_group().trajectories[:played])])
    log.summary({'method': method, 'seed': seed, 'final': {'em': em, 'f1': em}, 'final_em': em, 'collapsed': False})
    return log.folder


def evaluated(folder, model=BIG, em=.5, **sets):
    "An evaluation: scores and manifest of each set."
    for name, score in (sets or {'hotpotqa': em}).items():
        place = folder / name
        place.mkdir(parents=True)
        (place / 'scores.json').write_text(json.dumps({'score': score, 'em': score, 'f1': score, 'by_hops': {}}))
        (place / 'manifest.json').write_text(json.dumps({'model': {'name': model}, 'settings': {'model': model}}))
    return folder


def assessed(run, step, em=.5, sets=SEVEN):
    "An evaluation of the checkpoint of a step of a run, beside it: the same score on each set."
    return evaluated(run.with_name(f'{run.name}-at-{step}'), f'models/{run.name}/step-{step}', **dict.fromkeys(sets, em))
