"""Run folders as the program writes them, made in a moment: of trainings, and of evaluations; what a short run is; and
what `begin_run` makes one after the other, for tests that want one piece of a run."""
import json
from pathlib import Path

from credit_rl import setup
from credit_rl.runlog import RunLog
from credit_rl.trajectory import example_group, to_json

SEVEN = ('nq', 'triviaqa', 'popqa', 'hotpotqa', '2wikimultihopqa', 'musique', 'bamboogle')
BASE = str(Path(__file__).resolve().parents[2] / 'data' / 'tiny_base')
# A run of two seconds with checkpoints in it. The KL term makes it update at every step, so that a state that is not
# restored shows. The fixture `finished` keeps runs that are over.
SHORT = dict(model=BASE, steps=3, eval_every=2, questions_per_step=4, group_size=4, questions=50, dev_questions=8,
             test_questions=8, max_turns=3, turn_tokens=12, kl=.01, world={'size': 200}, threads=1, track='')
BIG, SMALL = 'Qwen/Qwen2.5-7B-Instruct', 'Qwen/Qwen2.5-3B-Instruct'


def begun(folder, **params):
    "The log of a run that has begun: its settings are written, and nothing else."
    log = RunLog(folder)
    log.write_params({'method': 'tspo', 'seed': 0, 'steps': 1, 'options': {}, **params})
    return log


def made(folder, method='tips', model=BIG, seed=0, em=.5, steps=2, played=0, logged=None, **settings):
    "A finished run of training, as one writes it: its settings, two steps, its summary, so many kept rollouts."
    log = begun(folder, method=method, model=model, seed=seed, steps=steps, **settings)
    for step in range(1, steps + 1): log.metrics(step, em=em, tokens=10. * step, seconds_step=4., dev_em=em,
                                                      **(logged or {}))
    if played: log.turns(1, [{'kind': 'train', 'trajectory': to_json(t), 'reward': float(i == 0)}
                             for i, t in enumerate(example_group().trajectories[:played])])
    log.summary({'method': method, 'seed': seed, 'final': {'em': em, 'f1': em}, 'final_em': em, 'collapsed': False})
    return log.folder


def evaluated(folder, model=BIG, em=.5, **sets):
    "An evaluation: scores and manifest of each set."
    for name, score in (sets or {'hotpotqa': em}).items():
        place = folder / name
        place.mkdir(parents=True)
        scores = {**dict.fromkeys(('score', 'em', 'f1'), score), 'metric': 'em', 'by_hops': {}}
        (place / 'scores.json').write_text(json.dumps(scores))
        (place / 'manifest.json').write_text(json.dumps({'model': {'name': model}, 'settings': {'model': model}}))
    return folder


def assessed(run, step, em=.5, sets=SEVEN):
    "An evaluation of the checkpoint of a step of a run, beside it: the same score on each set."
    place, model = run.with_name(f'{run.name}-at-{step}'), f'models/{run.name}/step-{step}'
    return evaluated(place, model, **dict.fromkeys(sets, em))


def answered(folder, model, sets, baseline=None, greedy=True, hops=None, tries=1):
    "An evaluation with rows: by set a list of (id, right, calls, answered); hops: set → id → number; tries: a pool."
    for name, rows in sets.items():
        right = [float(r) for _, r, *_ in rows]
        by = {}
        for i, r, *_ in rows if hops and name in hops else (): by.setdefault(str(hops[name][i]), []).append(float(r))
        log = RunLog(folder / name)
        log.turns(0, [{'kind': 'evaluate' if tries == 1 else 'pool', 'id': i, 'carl_em': float(r), 'calls': c,
                       'answer_rate': float(a)} for i, r, c, a in rows])
        scores = {'metric': 'carl_em', 'score': sum(right) / len(right), 'questions': len(rows),
                  'by_hops': {h: {'questions': len(x), 'score': sum(x) / len(x)} for h, x in by.items()}}
        (folder / name / 'scores.json').write_text(json.dumps(scores))
        (folder / name / 'manifest.json').write_text(json.dumps({
            'model': {'name': model}, 'decoding': {'tries': tries}, 'settings': {'model': model, 'baseline': baseline, 'greedy': greedy}}))
    return folder


def judged(test, rate):
    "A judge's verdicts on the pairs of an evaluation, of two types."
    place = test / 'pairs'
    rates = {'questions': 2, 'reference_pass': rate, 'hallucination_pass': .9, 'prs_long': 1.}
    (place / 'judged.json').write_text(json.dumps({'dataset': 'pairs', 'all': rates, 'multi': rates,
                                                   'simple': {**rates, 'reference_pass': None}}))
    return test


def setup_of(config):
    "Questions, search and model of a run of these settings."
    return setup.make_setup(config, setup.origin_of(config), lambda line: None)


def learner_of(config, model):
    "The learner of a run of these settings."
    return setup.make_learner(config, setup.origin_of(config), model)
