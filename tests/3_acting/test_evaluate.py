"""From files to numbers: nine sets through one command, a scripted player whose score is known beforehand, manifests,
and what a replay notices."""
import dataclasses
import gzip
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from credit_rl import evaluate as evaluation
from credit_rl.benchmarks import BENCHMARKS
from credit_rl.datasets import MIXTURES, load_corpus, load_questions
from credit_rl.engine import ScriptedEngine
from credit_rl.evaluate import (_intervals, compare_rows, evaluation_figure, evaluation_table,
                                main, manifest_differences, NEAR, read_manifest, read_scores, replay_evaluation,
                                run_evaluation, set_names, Evaluation)
from credit_rl.parameters import from_settings
from credit_rl.metrics import cover_match, exact_match, normalize
from credit_rl.models import model_hashes
from credit_rl.protocol import PROTOCOLS, TEMPLATES, byte_tokenizer
from credit_rl.retrieval import BM25
from credit_rl.search_service import SearchCache, SearchClient, SearchServer
from credit_rl.recorded import read_recording
from credit_rl.runlog import read_turns
from credit_rl.trajectory import Stop, trajectory_from_json
from credit_rl.warmup import pool_tiers
from hub import Hub
from hub_rows import hub_files
from random_models import random_model
from templates import template_text

DATA = Path(__file__).resolve().parents[2] / 'data'
ROWS = DATA / 'rows'
SAMPLE = DATA / 'hotpotqa_sample.json'
SEVEN = MIXTURES['tspo'].evaluate
# rows of our own, of every set
COMMON = [n for n, b in BENCHMARKS.items() if b.common]
FILES = {**{n: str(next(ROWS.glob(f'{n}.*'))) for n, b in BENCHMARKS.items() if n != 'hotpotqa' and not b.folder},
         'hotpotqa': str(SAMPLE)}
BARE = ('nq', 'triviaqa', 'popqa', 'bamboogle')  # their rows bring no passages
QUICK = dict(max_turns=2, turn_tokens=6, max_tokens=16384, passages=2)


pytestmark = pytest.mark.usefixtures('on_a_cpu')


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp('model'))


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    "The sample's passages as a corpus file, for the sets that bring none."
    path = tmp_path_factory.mktemp('corpus') / 'corpus.jsonl'
    path.write_text(''.join(
        json.dumps({'id': p.id, 'title': p.title, 'text': p.text}) + '\n' for p in load_corpus('hotpotqa', SAMPLE)))
    return str(path)


def quiet(settings, **rest):
    "Run an evaluation without a word. Returns its folder."
    return run_evaluation(settings, say=lambda line: None, progress=False, **rest)


# ---- nine sets, one command ----

def check_nine(run, asked, loaded):
    "What must be true of a random model's evaluation of all sets; `loaded` gives the questions of a set."
    scores = read_scores(run)
    assert list(scores) == COMMON and len(scores) == 9 and json.loads((run / 'summary.json').read_text()) == scores
    for name, s in scores.items():
        manifest, rows, questions = read_manifest(run / name), read_turns(run / name), {q.id: q for q in loaded(name)}
        assert len(rows) == s['questions'] == manifest['questions']['asked'] == min(asked, len(questions))
        assert [r['id'] for r in rows] == manifest['questions']['ids']
        assert manifest['questions']['loaded'] == len(questions)
        assert s['metric'] == ('numeric' if name in ('gsm8k', 'finqa') else 'em') and 0 <= s['score'] <= .5
        for r in rows:
            t, q = trajectory_from_json(r['trajectory']), questions[r['id']]
            assert (r['question'], tuple(r['golds']), t.question.text) == (q.text, q.answers, q.text)
            assert r['turns'] == len(t.turns) <= QUICK['max_turns']
            assert r['tokens'] == sum(len(turn.action_ids) for turn in t.turns)
            assert (r['prediction'] is not None) == (t.stop is Stop.ANSWER)
            assert r['prediction'] or r['em'] == r['f1'] == r['cover_em'] == 0
        assert (manifest['corpus'] is not None) == (manifest['retriever'] is not None) == (name in SEVEN)
        if name in SEVEN:
            assert re.fullmatch('[0-9a-f]{32}', manifest['corpus']['hash']) and manifest['corpus']['passages'] >= 4
            assert manifest['retriever'] == {'name': 'BM25', 'k1': .9, 'b': .4, 'variant': 'lucene', 'top_k': 2,
                                             'passage_tokens': None}
            assert 'call a search engine' in manifest['prompt']
        else:
            assert 'search' not in manifest['prompt'] and manifest['protocol']['name'] == 'direct'
    return scores


def check_finqa(run, tokenizer):
    "The page stands in the prompt: the words before the table, its rows, and the question after it."
    for r in read_turns(run / 'finqa'):
        prompt = tokenizer.decode(r['trajectory']['prompt_ids'])
        table = [line for line in r['question'].splitlines() if ' | ' in line]
        assert table and all(line in prompt for line in table) and r['question'].strip() in prompt
        assert prompt.rindex('Question: ') > prompt.rindex(table[-1])


def test_nine_sets_of_our_own_by_one_command(model, corpus, tmp_path, capsys):
    given = {**QUICK, 'model': model, 'data': 'all', 'path': FILES, 'corpus': dict.fromkeys(BARE, corpus),
             'run': str(tmp_path / 'run'), 'questions': 2}
    main([f'{k}={json.dumps(v)}' for k, v in given.items()])
    scores = check_nine(tmp_path / 'run', 2, lambda name: load_questions(name, FILES[name]))
    check_finqa(tmp_path / 'run', evaluation.load_tokenizer(model))
    said = capsys.readouterr().out
    assert all(f'{name}: ' in said for name in COMMON) and '95 %' in said and 'mean' in said
    table, hops = (evaluation_table(tmp_path / 'run', by_hops=by_hops) for by_hops in (False, True))
    assert table.index.tolist() == [*COMMON, 'mean']
    assert table.loc['mean', 'score'] == pytest.approx(sum(s['score'] for s in scores.values()) / 9, abs=1e-3)
    assert {n for n, _ in hops.index} == {'hotpotqa', '2wikimultihopqa', 'musique', 'bamboogle'}
    (ax,) = evaluation_figure(tmp_path / 'run').axes
    assert [label.get_text().split()[0] for label in ax.get_yticklabels()] == COMMON[::-1]


@pytest.mark.long
def test_names_of_the_hub(model, tmp_path, run_python):
    "A model and a data set by name: questions, passages and weights come from a (local) hub."
    pytest.importorskip('datasets')
    files = {p.name: p.read_bytes() for p in Path(model).iterdir()}
    repository, _, commit = BENCHMARKS['hotpotqa'].hub
    rows = hub_files('hotpotqa', {'dev': 'validation'})
    with Hub({'us/random': ('1' * 40, files), repository: (commit, rows)}) as hub:
        env = {'HF_HOME': str(tmp_path / 'home'), 'HF_ENDPOINT': hub.url, 'HF_HUB_OFFLINE': '0', 'NO_PROXY': '127.0.0.1',
               'CUDA_VISIBLE_DEVICES': ''}
        run_python('-m', 'credit_rl.evaluate', 'model=us/random', 'data=hotpotqa', 'turn_tokens=6',
                   f'run={tmp_path / "run"}', env={**env, 'PYTHONPATH': str(DATA.parent)}, cwd=tmp_path)
    manifest = read_manifest(tmp_path / 'run' / 'hotpotqa')
    asked, used = manifest['questions'], manifest['model']
    assert asked['revision'] == f'{repository}@distractor@{commit}' and asked['asked'] == 6
    assert manifest['corpus']['passages'] == len(load_corpus('hotpotqa', SAMPLE)) and used['name'] == 'us/random'
    assert used['files'] == model_hashes(model) and read_scores(tmp_path / 'run')['hotpotqa']['em'] <= .5


def researcher(questions):
    "A player that searches its question and answers with a gold if one passage that came back holds it."
    golds = {q.text.strip(): q.answers for q in questions}

    def act(text, rng):
        question = text.rsplit('Question: ', 1)[1].split('<|im_end|>')[0]
        if '<tool_response>\nDoc 1' not in text:
            return f'<tool_call> {json.dumps({"name": "search", "arguments": {"query_list": [question]}})} </tool_call>'
        seen = text.rsplit('<tool_response>\n', 1)[1].rsplit('\n</tool_response>', 1)[0]
        return f'<answer> {next((g for g in golds[question] if cover_match(seen, [g])), "unknown")} </answer>'
    return act


# ---- the same again, and what a replay notices ----

@pytest.fixture(scope='module')
def played(model, tmp_path_factory):
    "The settings of an evaluation on the sample, and its run: (settings, run folder)."
    settings = {**QUICK, 'model': model, 'data': 'hotpotqa', 'path': str(SAMPLE),
                'run': str(tmp_path_factory.mktemp('played') / 'run')}
    return settings, quiet(settings)


def parts(lines):
    "Which inputs differ, by the name before the colon."
    return {line.split(':')[0] for line in lines}


def test_replay_names_a_changed_row(played, tmp_path):
    "Of a copy of the file: another question, and another gold."
    rows = json.loads(SAMPLE.read_text())
    rows[2]['question'] += ' Say so.'
    rows[3]['answer'] = 'Orvane'
    (tmp_path / 'sample.json').write_text(json.dumps(rows))
    moved = {'path': str(tmp_path / 'sample.json')}
    (result,) = replay_evaluation(played[1], changes=moved, say=lambda line: None, progress=False).values()
    assert parts(result.inputs) == {'questions.loaded_hash', 'questions.asked_hash', "question 'sample-2'",
                                    "question 'sample-3'"}
    assert any('its golds' in line for line in result.inputs)
    assert result.rows == ("row 'sample-2': another prompt",)               # golds are not shown to the player


def test_a_manifest_names_changed_settings(played, monkeypatch):
    def manifest(**changes):
        s = from_settings(Evaluation, {**played[0], **changes})
        return evaluation._plan_evaluation(s, 'hotpotqa', evaluation._LazyModel(s)).manifest
    before = manifest()
    for changes, named in (({'greedy': False}, {'decoding.greedy'}), ({'passages': 3}, {'retriever.top_k'}),
                           ({'turn_tokens': 5}, {'decoding.max_tokens', 'limits.turn_tokens'}), ({'seed': 1}, {'seed'}),
                           ({'batch': 3}, {'machine.batch'}), ({'max_turns': 1}, {'limits.max_turns'}),
                           ({'malformed': 'end'}, {'malformed'}),
                           ({'answer_stop': 'last'}, {'decoding.stop', 'protocol.answer_stop'}),
                           ({'prompt_tokens': 9000, 'response_tokens': 900},
                            {'limits.prompt_tokens', 'limits.response_tokens'})):
        assert parts(manifest_differences(before, manifest(**changes), ignore=())) == named, changes
    plain = PROTOCOLS['tspo']
    monkeypatch.setitem(PROTOCOLS, 'tspo', dataclasses.replace(plain, user='Be brief. ' + plain.user))
    assert parts(manifest_differences(before, manifest(), ignore=())) == {'prompt', 'prompt_hash', 'protocol.user'}


def test_replay_names_another_version_and_other_rows(played, tmp_path):
    "What was kept is edited here: a package, the weights' hash, and two rows."
    folder = shutil.copytree(played[1], tmp_path / 'run') / 'hotpotqa'
    manifest = json.loads((folder / 'manifest.json').read_text())
    manifest['versions']['transformers'] = '0.1'
    manifest['model']['files']['model.safetensors'] = '0' * 64
    (folder / 'manifest.json').write_text(json.dumps(manifest))
    rows = [json.loads(line) for line in gzip.decompress((folder / 'turns.jsonl.gz').read_bytes()).splitlines()]
    rows[4]['prediction'] = 'Paris'
    rows[5]['trajectory']['turns'][0]['action_ids'][0] += 1
    (folder / 'turns.jsonl.gz').write_bytes(gzip.compress(''.join(json.dumps(r) + '\n' for r in rows).encode()))
    (result,) = replay_evaluation(folder, say=lambda line: None, progress=False).values()
    assert parts(result.inputs) == {'versions.transformers', 'model.files.model.safetensors'} and len(result.rows) == 2
    assert "'Paris' before" in result.rows[0] and result.rows[1].startswith("row 'sample-5', turn 0: action differs")
    with pytest.raises(SystemExit) as stopped: main(['--replay', str(folder)])
    assert stopped.value.code == 1


# ---- going on, and refusing ----

def test_what_is_done_is_not_played_again(model, tmp_path, monkeypatch):
    settings = {**QUICK, 'model': model, 'data': 'gsm8k,finqa', 'path': FILES, 'run': str(tmp_path)}
    real, said = evaluation.rollout, []

    def stops(engine, env, questions, *rest):
        if questions[0].source == 'finqa': raise KeyboardInterrupt
        said.append(questions[0].source)
        return real(engine, env, questions, *rest)
    monkeypatch.setattr(evaluation, 'rollout', stops)
    with pytest.raises(KeyboardInterrupt): quiet(settings)
    assert said == ['gsm8k'] and {p.name for p in tmp_path.iterdir()} == {'gsm8k', 'playing'}    # finqa was begun
    monkeypatch.setattr(evaluation, 'rollout', real)
    log, lines = tmp_path / 'gsm8k' / 'turns.jsonl.gz', []
    before = log.stat().st_mtime_ns
    run_evaluation(settings, say=lines.append, progress=False)
    assert log.stat().st_mtime_ns == before and ['evaluated before' in line for line in lines[:2]] == [True, False]
    assert {p.name for p in tmp_path.iterdir()} == {'gsm8k', 'finqa', 'summary.json'}
    monkeypatch.setattr(evaluation, 'load_model', None)  # all is done: no model is needed
    quiet(settings)
    with pytest.raises(ValueError, match='evaluation'): quiet({**settings, 'max_turns': 1})


BAD = [({'data': 'hotpot'}, "'hotpotqa'"), ({'data': []}, 'data'), ({'path': 'no/such/file.json'}, 'path'),
       ({'corpus': 'no/corpus'}, 'corpus'), ({'corpus': 'http://127.0.0.1:9'}, 'reached'), ({'path': 'empty.jsonl'}, 'rows'),
       ({'data': 'nq', 'path': FILES['nq']}, 'passages'), ({'model': 'no/such/folder/here'}, 'folder'),
       ({'model': 'bare'}, 'weights'), ({'model': None}, 'given'), ({'protocol': 'tspoo'}, "'tspoo'"),
       ({'context_tokens': 0}, 'context_tokens'), ({'dtype': 'float33'}, 'dtype'), ({'engine': 'gpt'}, 'engine'),
       ({'questions': 0}, 'at least 1'), ({'temperature': 0.0}, 'temperature'), ({'max_tokens': 200}, 'room'),
       ({'protocol': 'direct', 'corpus': 'no/corpus'}, 'without a search'), ({'split': 'tests', 'path': 'folder'}, 'unknown')]


@pytest.mark.parametrize('changes, message', BAD)
def test_bad_input_is_refused_before_the_model_is_loaded(model, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty.jsonl').write_text('')
    (tmp_path / 'folder').mkdir()
    shutil.copytree(model, tmp_path / 'bare', ignore=shutil.ignore_patterns('*.safetensors'))
    monkeypatch.setattr(evaluation, 'load_model', lambda *args: pytest.fail('the model was loaded'))
    given = {**QUICK, 'model': model, 'data': 'hotpotqa', 'path': str(SAMPLE), 'run': str(tmp_path / 'run'), **changes}
    with pytest.raises((ValueError, FileNotFoundError, ConnectionError), match=message): quiet(given)
    assert not (tmp_path / 'run').exists()


# ---- other ways to search, or none ----

def test_an_index_a_server_and_files_give_the_same_rows(corpus, tmp_path):
    pytest.importorskip('fastapi', reason='the extra `serve` is not installed')
    questions, search = load_questions('nq', FILES['nq']), BM25(load_corpus('nq', corpus))
    engine = ScriptedEngine(researcher(questions), byte_tokenizer(), max_length=10 ** 5)
    play = lambda name, given: quiet({'data': 'nq', 'path': FILES['nq'], 'corpus': given, 'run': str(tmp_path / name),
                                      'model': 'r'}, engine=engine) / 'nq'
    search.save(tmp_path / 'index')
    with SearchServer(search) as server:
        url, kept = server.url, str(tmp_path / 'kept.jsonl')
        folders = [play('file', corpus), play('indexed', str(tmp_path / 'index')), play('served', url)]
        SearchCache(kept, SearchClient(url)).search([q.text.strip() for q in questions], 9)
    folders.append(play('kept', kept))                                                     # the server is gone
    assert len({(f / 'turns.jsonl.gz').read_bytes() for f in folders}) == 1
    file, indexed, served, replayed = map(read_manifest, folders)
    assert replayed['retriever']['name'] == 'SearchCache' and replayed['retriever']['kept'] == kept
    assert not manifest_differences(file, indexed) and file['corpus']['hash'] == search.corpus
    assert served['corpus'] == {'passages': None, 'hash': None} and served['retriever']['url'] == url


def with_template(model, folder, text=None):
    "A copy of the model with another chat template, or with none."
    shutil.copytree(model, folder)
    tokenizer = evaluation.load_tokenizer(model)
    tokenizer.chat_template = text
    (folder / 'chat_template.jinja').unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_model_that_gives_nan_is_an_error_that_names_it(model, tmp_path):
    "One weight is NaN: such a model must not be reported with EM 0.0."
    from safetensors.torch import load_file, save_file
    broken = tmp_path / 'broken'
    shutil.copytree(model, broken)
    path = broken / 'model.safetensors'
    weights = load_file(path)
    next(w for n, w in weights.items() if n.endswith('norm.weight'))[0] = float('nan')
    save_file(weights, path, {'format': 'pt'})
    for name, more in (('greedy', {}), ('sampled', {'greedy': False, 'temperature': 1.})):
        with pytest.raises(ValueError, match=f"'{broken}' gives probabilities"):
            quiet({**QUICK, 'data': 'gsm8k', 'path': FILES['gsm8k'], 'protocol': 'direct', 'model': str(broken),
                   'run': str(tmp_path / name), **more})
        assert not list((tmp_path / name).rglob('summary.json'))


def test_golds_that_normalise_to_nothing_are_counted_when_a_set_is_loaded(model, tmp_path):
    rows = [{'id': str(i), 'question': f'Who is {i}?', 'golden_answers': golds}
            for i, golds in enumerate((['A.'], ['The The', 'TT'], ['Ada'], ['...']))]
    path = tmp_path / 'nq.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    with pytest.warns(UserWarning, match='normalise'):
        folder = quiet({**QUICK, 'data': 'nq', 'path': str(path), 'protocol': 'direct', 'model': model,
                        'run': str(tmp_path / 'run')}) / 'nq'
    assert 3 in (part.get('empty_golds') for part in read_manifest(folder).values() if isinstance(part, dict))


def test_a_base_model_without_a_template_is_asked_by_another(model, tmp_path):
    bare = with_template(model, tmp_path / 'bare')
    settings = {**QUICK, 'model': bare, 'data': 'hotpotqa', 'path': str(SAMPLE), 'run': str(tmp_path / 'run'),
                'questions': 1}
    with pytest.raises(ValueError, match='template'): quiet(settings)
    (tmp_path / 'own.jinja').write_text(TEMPLATES['chatml'])
    runs = {given: quiet({**settings, 'template': given, 'run': str(tmp_path / name)}) / 'hotpotqa'
            for name, given in (('plain', 'plain'), ('chatml', 'ChatML'), ('file', str(tmp_path / 'own.jinja')))}
    plain, chatml, file = map(read_manifest, runs.values())
    assert '<|im_start|>' not in plain['prompt'] and chatml['prompt'].count('<|im_start|>') == 3
    assert not manifest_differences(chatml, file) and 'template.hash' in parts(manifest_differences(plain, chatml))
    with pytest.raises(ValueError, match="'chatlm'"): quiet({**settings, 'template': 'chatlm'})


def test_a_template_that_rewrites_is_evaluated_in_its_own_contexts(model, tmp_path):
    thinking = with_template(model, tmp_path / 'thinking', template_text('qwen3'))
    settings = {**QUICK, 'model': thinking, 'data': 'hotpotqa', 'path': str(SAMPLE), 'max_turns': 3, 'questions': 2,
                'template_options': {'enable_thinking': False}}
    edited, sampled = (quiet({**settings, 'run': str(tmp_path / str(h)), 'history': h}) / 'hotpotqa'
                       for h in (None, 'as-sampled'))
    contexts = [[turn['context_ids'] is not None for turn in r['trajectory']['turns']] for r in read_turns(edited)]
    assert all(c == [False, True, True] for c in contexts) and read_manifest(edited)['history'] == 'template'
    assert all(turn['context_ids'] is None for r in read_turns(sampled) for turn in r['trajectory']['turns'])
    assert '<think>\n\n</think>' in read_manifest(edited)['prompt']
    assert replay_evaluation(edited, say=lambda line: None, progress=False)['hotpotqa'].same
    with pytest.raises(ValueError, match="'enable_thought'"):
        quiet({**settings, 'template_options': {'enable_thought': False}, 'run': str(tmp_path / 'no')})


def test_a_call_where_nothing_is_searched_gets_an_error(tmp_path):
    call = '<tool_call> {"name": "search", "arguments": {"query_list": ["x"]}} </tool_call>'
    act = lambda text, rng: '<answer> 2100 </answer>' if 'Error: there is nothing to search' in text else call
    folder = quiet({'data': 'gsm8k', 'path': FILES['gsm8k'], 'run': str(tmp_path), 'model': 'r'},
                   engine=ScriptedEngine(act, byte_tokenizer(), max_length=10 ** 5))
    s = read_scores(folder)['gsm8k']
    assert s['numeric'] == s['score'] == .5 and s['turns'] == 2 and s['calls'] == 1        # the first of two


# ---- numbers ----


def test_intervals_of_an_evaluation_cover():
    """Shares and word F1, from thirty questions on, and tokens, whose numbers are far from normal, from 150 on: the
    truth is held in 93 to 97 %, give or take three errors of what 300 evaluations can show (1.5 % each)."""
    rng = np.random.default_rng(0)
    part = lambda n: np.where(rng.random(n) < .5, 0., rng.random(n))
    half = lambda n: np.where(rng.random(n) < .4, 1., part(n))
    for name, n, drawn, true in (('em', 30, lambda n: (rng.random(n) < .3) * 1., .3), ('f1', 30, half, .4 + .6 * .25),
                                 ('tokens', 150, lambda n: rng.lognormal(0, .7, n), math.exp(.245))):
        ends = [_intervals([{name: x} for x in drawn(n)], [name], 0)[name] for _ in range(300)]
        share = np.mean([low <= true <= high for low, high in ends])
        assert .885 < share < .998, (name, share)


# ---- names ----

def test_which_sets_are_meant():
    assert set(BENCHMARKS) - set(COMMON) == {'browsecompplus', 'real'}
    assert set_names('all') == COMMON and set_names('tspo') == list(SEVEN)
    assert set_names('GSM8K, Hotpot-QA,gsm8k') == set_names(['gsm8k', 'hotpotqa']) == ['gsm8k', 'hotpotqa']
    with pytest.raises(ValueError, match='must be an int'):
        from_settings(Evaluation, {'seed': 1.5})


# ---- several ranks ----

@pytest.mark.long
def test_two_ranks_write_what_one_writes(model, corpus, tmp_path, monkeypatch):
    """Two sets, an odd number of questions, sampled and not greedy; the two go on where one rank was interrupted. An
    evaluation that is done is only shown."""
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    ids = lambda row: [[t['action_ids'], t['observation_ids']] for t in row['trajectory']['turns']]
    played = lambda rows: [{**r, 'trajectory': ids(r)} for r in rows]     # log-probabilities are rounded otherwise
    settings = dict(model=model, data='hotpotqa, nq', path={'hotpotqa': str(SAMPLE), 'nq': FILES['nq']},
                    corpus={'nq': corpus}, greedy=False, questions=5, threads=1, **QUICK)
    one, lines = quiet({**settings, 'run': str(tmp_path / 'one')}), []
    def interrupt(*given): raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(evaluation, '_keep', interrupt)
        quiet({**settings, 'run': str(tmp_path / 'two')})
    (kept,) = (tmp_path / 'two' / 'playing' / 'hotpotqa').glob('rank-*/turns.jsonl.gz')
    kept.write_bytes(kept.read_bytes()[:-9])                              # the last row is lost
    two = run_evaluation({**settings, 'run': str(tmp_path / 'two'), 'ranks': 2}, say=lines.append, progress=False)
    for name in ('hotpotqa', 'nq'):
        assert played(read_turns(one / name)) == played(read_turns(two / name))
        assert sum(r['tokens'] for r in read_turns(two / name)) > 0
        assert (one / name / 'scores.json').read_text() == (two / name / 'scores.json').read_text()
    assert read_scores(one) == read_scores(two) and not (two / 'playing').exists()
    assert [line.split(':')[0] for line in lines] == ['2 ranks', 'hotpotqa', 'nq']            # by one rank only
    log = (two / 'ranks.log').stat().st_mtime_ns
    quiet({**settings, 'run': str(two), 'ranks': 2})
    assert (two / 'ranks.log').stat().st_mtime_ns == log                        # nothing was started
    with pytest.raises(ValueError, match='ranks'):
        quiet({**settings, 'run': str(tmp_path / 'three'), 'ranks': 2}, engine=object())
    with pytest.raises(ValueError, match='ranks'): quiet({**settings, 'ranks': 0})


def test_each_rank_of_an_evaluation_gives_its_vllm_its_own_gpu(monkeypatch):
    monkeypatch.setattr(evaluation, 'VLLMEngine', lambda folder, tokenizer, gpu, **given: gpu)
    monkeypatch.setattr(evaluation, 'load_tokenizer', lambda folder: None)
    tiny = str(DATA / 'tiny_base')
    settings = lambda **given: evaluation._LazyModel(Evaluation(engine='vllm', model=tiny, **given)).engine
    for name, value in (('RANK', '5'), ('WORLD_SIZE', '8'), ('LOCAL_RANK', '1'), ('MASTER_ADDR', '127.0.0.1')):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    assert settings(ranks=8) == '1' and settings() is None


# ---- one manifest, one set of numbers ----

@pytest.fixture(scope='module')
def tiny_files(tmp_path_factory):
    "Questions and pages of a tiny world as files, and the settings under which data/tiny_base plays them."
    from credit_rl.world import make_world
    here, world = tmp_path_factory.mktemp('tiny'), make_world('dev', seed=5, size=80, questions=12)
    rows = [{'id': q.id, 'question': q.text, 'golden_answers': list(q.answers)} for q in world.questions]
    (here / 'questions.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    pages = [{'id': n, 'title': n, 'text': text} for n, text in world.pages.items()]
    (here / 'pages.jsonl').write_text('\n'.join(map(json.dumps, pages)))
    return {'model': str(DATA / 'tiny_base'), 'data': 'nq', 'path': str(here / 'questions.jsonl'), 'corpus':
            str(here / 'pages.jsonl'), 'protocol': 'tiny', 'turn_tokens': 24, 'max_tokens': 400, 'gaps': True}


@pytest.mark.long
def test_two_processes_give_one_set_of_numbers(tiny_files, tmp_path, run_python, capsys):
    "With another hash seed, other threads and batch sizes: row for row the same tokens, and the same scores."
    quiet({**tiny_files, 'run': str(tmp_path / 'one'), 'threads': 1, 'batch': 1})
    given = {**tiny_files, 'run': str(tmp_path / 'other'), 'threads': 2, 'batch': 7}
    run_python('-m', 'credit_rl.evaluate', *(f'{k}={json.dumps(v)}' for k, v in given.items()),
               env={'PYTHONHASHSEED': '77', 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '2'})
    one, other = (tmp_path / name / 'nq' for name in ('one', 'other'))
    (found,), said = compare_rows(tmp_path / 'one', tmp_path / 'other').values(), capsys.readouterr().out
    assert found.same and found.questions == 12 and 'nq: 0 of 12 rows differ' in said
    written = lambda row: [turn['action_ids'] for turn in row['trajectory']['turns']]
    differ = [a['gap'] for a, b in zip(read_turns(one), read_turns(other)) if written(a) != written(b)]
    assert all(gap < NEAR for gap in differ) and len(found.ties) >= len(differ)
    if not differ: assert (one / 'scores.json').read_text() == (other / 'scores.json').read_text()
    manifests = read_manifest(one), read_manifest(other)
    assert not manifest_differences(*manifests) and len(manifest_differences(*manifests, ignore=())) == 2
    main(['--same', str(one), str(other)])                                                     # exits with 0
    assert all(0 < r['gap'] < 20 for r in read_turns(one)) and any(r['turns'] > 2 for r in read_turns(one))


def test_a_near_tie_may_differ_and_nothing_else_may(tiny_files, tmp_path, capsys):
    """A model in which one word is written like another: it cannot tell them apart, so that every row with it has a
    gap of 0 and may differ. In the model as it is, the same difference is one."""
    from transformers import AutoModelForCausalLM
    tokenizer = evaluation.load_tokenizer(tiny_files['model'])
    model = AutoModelForCausalLM.from_pretrained(tiny_files['model'])
    think, twin = tokenizer.convert_tokens_to_ids(['<think>', '%'])
    with torch.no_grad(): model.get_input_embeddings().weight[twin] = model.get_input_embeddings().weight[think]
    model.save_pretrained(tmp_path / 'twins')
    tokenizer.save_pretrained(tmp_path / 'twins')
    for name, folder in (('plain', tiny_files['model']), ('tied', str(tmp_path / 'twins'))):
        run = quiet({**tiny_files, 'model': folder, 'questions': 4, 'run': str(tmp_path / name)})
        shutil.copytree(run, tmp_path / f'{name}-again')
        path = tmp_path / f'{name}-again' / 'nq' / 'turns.jsonl.gz'
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        rows[1]['trajectory']['turns'][0]['action_ids'][0] = twin
        path.write_bytes(gzip.compress(''.join(json.dumps(r) + '\n' for r in rows).encode()))
    (plain,), (tied,) = (compare_rows(tmp_path / n, tmp_path / f'{n}-again').values() for n in ('plain', 'tied'))
    assert not plain.same and len(plain.rows) == 1 and 'turn 0: action differs' in plain.rows[0] and not plain.ties
    assert tied.same and not tied.rows and len(tied.ties) == 4
    assert 'turn 0: action differs' in tied.ties[1] and tied.ties[0].split(': ')[1].startswith('alike; two best tokens')
    assert 'nq, near tie: row' in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped: main(['--same', str(tmp_path / 'plain'), str(tmp_path / 'plain-again')])
    assert stopped.value.code == 1


def test_what_cannot_be_compared_is_refused(played, tiny_files, tmp_path):
    settings, run = played
    with pytest.raises(ValueError, match='has no gap.*gaps=true'): compare_rows(run, run)
    tiny = quiet({**tiny_files, 'questions': 1, 'run': str(tmp_path / 'tiny')})
    with pytest.raises(ValueError, match='hotpotqa'): compare_rows(tiny, run)
    more = quiet({**tiny_files, 'questions': 2, 'run': str(tmp_path / 'more')})
    (found,) = compare_rows(tiny, more, say=lambda line: None).values()
    assert not found.same and sum('in one of them only' in line for line in found.inputs) == 1
    for given in ({'greedy': False}, {'engine': 'vllm'}):
        with pytest.raises(ValueError, match="engine='hf'"): quiet({**tiny_files, **given})
    with pytest.raises(ValueError, match='ScriptedEngine'):
        quiet({**tiny_files, 'model': 'nobody', 'run': str(tmp_path / 'x')},
              engine=ScriptedEngine(None, evaluation.load_tokenizer(tiny_files['model'])))


# ---- the metric that a paper reports ----

def test_the_metric_asked_for_is_the_score(corpus, model, tmp_path):
    "A player that wraps the gold in more words: 0 by EM, 2·1/(1 + 3) by F1 of one gold word among three."
    questions = load_questions('gsm8k', FILES['gsm8k']) + load_questions('nq', FILES['nq'])
    golds = {q.text.strip(): q.answers[0] for q in questions}
    says = lambda text, rng: f'<answer> {next(g for q, g in golds.items() if q in text)} I think </answer>'
    engine = ScriptedEngine(says, evaluation.load_tokenizer(model), max_length=10 ** 6)
    given = {**QUICK, 'model': 'x', 'data': 'nq,gsm8k', 'path': FILES, 'corpus': {'nq': corpus}}
    scores = {m: read_scores(quiet({**given, 'metric': m, 'run': str(tmp_path / m)}, engine=engine))
              for m in ('em', 'f1', 'cover_em', 'carl_em')}
    assert all(s['gsm8k']['metric'] == 'numeric' and s['gsm8k']['score'] == 1 for s in scores.values())
    several = [len(normalize(golds[q.text.strip()]).split()) for q in questions if q.source == 'nq']
    assert scores['em']['nq']['score'] == 0 and scores['cover_em']['nq']['score'] == 1
    assert scores['f1']['nq']['score'] == pytest.approx(sum(2 * n / (2 * n + 2) for n in several) / len(several))
    assert scores['carl_em']['nq']['score'] == sum(n > 1 for n in several) / len(several)
    assert [evaluation_table(tmp_path / m).loc['nq', 'metric'] for m in scores] == ['EM', 'F1', 'cover EM', "CARL's EM"]
    with pytest.raises(ValueError, match='metric'): quiet({**given, 'metric': 'bleu'})


def test_a_set_whose_log_lost_its_end_is_not_taken_for_done(model, tmp_path):
    "The scores are there, the rollouts that they come from are not."
    settings = {'model': model, 'data': 'hotpotqa', 'path': str(SAMPLE), 'run': str(tmp_path / 'run'), **QUICK}
    path = quiet(settings) / 'hotpotqa' / 'turns.jsonl.gz'
    whole = path.read_bytes()
    for lost in (1, 400, 1000):
        path.write_bytes(whole[:-lost])
        with pytest.raises(ValueError, match='questions'): quiet(settings)
    path.write_bytes(whole)
    for name in ('scores.json', 'manifest.json'):
        kept = path.with_name(name).read_bytes()
        path.with_name(name).write_bytes(kept[:-30])
        with pytest.raises(ValueError, match=f'{name} is not valid JSON'): quiet(settings)
        path.with_name(name).write_bytes(kept)
    shutil.rmtree(path.parent)
    quiet(settings)
    assert read_turns(path.parent) and path.read_bytes() == whole


# ---- a pool: several answers to each question, as text ----

def test_a_pool_keeps_answers_goes_on_and_tells_tiers_by_any_metric(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, '_TOGETHER', 3)
    questions = load_questions('hotpotqa', SAMPLE, 'train')
    golds, plays = {q.text.strip(): q.answers[0] for q in questions}, []

    def act(text, rng):
        plays.append(text)
        if len(plays) == 14: raise KeyboardInterrupt                   # after three questions of four tries
        gold = next(g for q, g in golds.items() if q in text)
        right = gold if len(gold) % 2 else gold + ' then'
        return f'<answer> {right if rng.random() < .15 else "x"} </answer>'

    engine = lambda: ScriptedEngine(act, byte_tokenizer(), max_length=10 ** 5)
    settings = {'data': 'hotpotqa', 'path': str(SAMPLE), 'run': str(tmp_path / 'run'), 'model': 'r', 'split': 'train',
                'greedy': False, 'tries': 4, 'protocol': 'direct', 'max_tokens': 10 ** 5}
    with pytest.raises(KeyboardInterrupt): quiet(settings, engine=engine())
    assert 0 < len(read_turns(tmp_path / 'run/playing/hotpotqa/rank-0', pool=True)) < len(questions)
    folder = quiet(settings, engine=engine()) / 'hotpotqa'
    rows = read_turns(folder, pool=True)
    assert len(rows) == len(questions) and {len(r['answers']) for r in rows} == {4} and 'trajectory' not in rows[0]
    whole = quiet({**settings, 'run': str(tmp_path / 'whole')}, engine=engine()) / 'hotpotqa'
    given = {r['id']: r['answers'] for r in rows}
    assert {r['id']: r['answers'] for r in read_turns(whole, pool=True)} == given              # as if never interrupted
    for metric, right in (('em', exact_match), ('cover', cover_match)):
        found = pool_tiers(folder.parent, questions, metric)
        assert found == {(q.source, q.id): 1 + any(right(a, q.answers) for a in given[q.id]) for q in questions}
    assert set(found.values()) == {1, 2} and len(pool_tiers(folder, questions[:1])) == 1
    assert pool_tiers([folder.parent, whole], questions, metric) == found
    more = [*questions, dataclasses.replace(questions[0], id='other')]
    assert pool_tiers(folder, more, some=True) == pool_tiers(folder, questions)
    for call, said in ((lambda: pool_tiers(folder, questions, asked='other'), 'prompt'),
                       (lambda: pool_tiers(folder, more), 'lacks 1 of'), (lambda: read_turns(folder), 'pool'),
                       (lambda: read_recording(folder), 'pool'), (lambda: compare_rows(folder, folder), 'pool'),
                       (lambda: replay_evaluation(folder, engine=engine()), 'pool'),
                       (lambda: quiet({**settings, 'greedy': True}, engine=engine()), 'greedy')):
        with pytest.raises(ValueError, match=said): call()
