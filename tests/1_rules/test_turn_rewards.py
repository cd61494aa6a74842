"""35_turn_rewards: rule rewards, their place among the tokens, and a judge behind an HTTP server on this machine."""
import dataclasses, gzip, json, math

import pytest, torch
from hypothesis import given, strategies as st
from torch.testing import assert_close

from credit_rl import judge as judges
from credit_rl.judge import Judge
from credit_rl.methods import compose, get_method
from credit_rl.parts import assign
from credit_rl.protocol import prompt_hash
from credit_rl.runlog import METRICS, read_metrics, same_metrics
from credit_rl.train import train
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn, example_group
from credit_rl.turn_rewards import (judge_prompt, judge_rewards, parse_ratings, place_rewards, rating_scores,
                                    rule_rewards)
from judge_server import Stub, counted, no_proxy  # noqa: F401
from made_runs import SHORT

NAN = math.nan


def rollout(question, *turns):
    "A trajectory of (call or None, observation); None: the environment said nothing."
    made = [Turn('tool' if call or seen is not None else 'answer', [1, 2], [-.1, -.2], () if seen is None else (3,), 'x',
                 seen or '', call and {'name': 'search', 'queries': [call]}) for call, seen in turns]
    return Trajectory(question, [0], made, Stop.ANSWER, 'x')


texts = st.text(alphabet='aAbB Error:', max_size=12)


@given(st.lists(st.tuples(texts, st.booleans()), max_size=5), st.lists(st.text('aAbB ', max_size=3), max_size=3),
       st.floats(0, 1), st.floats(0, 1))
def test_rule_rewards_are_those_of_e4(segments, golds, execution, presence):
    seen, called = [s for s, _ in segments], [c for _, c in segments]
    aware = rule_rewards(seen, golds, called, execution, presence)
    tool = rule_rewards(seen, golds, called, execution, presence, 'tool-only')
    assert len(aware) == len(tool) == len(segments)
    for text, call, a, t in zip(seen, called, aware, tool):
        ran = call and text.split() != [] and not text.strip().startswith('Error:')
        assert t == (execution if ran else 0)
        present = any(text.lower().find(g.strip().lower()) >= 0 for g in golds if g.strip() != '')
        assert a == (execution + presence if ran and present else t)  # once, however many golds match


def test_rules_refuse():
    for bad, error, match in ((dict(observations='x'), TypeError, 'lists of strings'),
                              (dict(golds='gold'), TypeError, 'lists of strings'),
                              (dict(called=[True, False]), ValueError, 'one truth value'),
                              (dict(variant='paper'), ValueError, 'tool-only')):
        with pytest.raises(error, match=match):
            rule_rewards(**{**dict(observations=['x'], golds=['x'], called=[True]), **bad})
    for weights in ((1, 1), (0, 0, 0), (1, -1, 1)):
        with pytest.raises(ValueError): rating_scores([[1, 1, 1]], weights)


@st.composite
def token_layouts(draw):
    "turn_rewards (N, K) float64 with zeros and NaN padding, token_turns (R, T), row_trajectory (R,), turn_mask (N, K)."
    lengths = st.tuples(st.integers(1, 4), st.integers(0, 2))                     # tokens of a turn, of its observation
    trajectories = draw(st.lists(st.lists(lengths, min_size=1, max_size=4), min_size=1, max_size=4))
    rows, owner = [], []
    for i, turns in enumerate(trajectories):
        line = [-1]
        for k, (tokens, observed) in enumerate(turns):
            if k and draw(st.booleans()):  # an edited context: a new row
                rows.append(line)
                owner.append(i)
                line = [-1]
            line += [k] * tokens + [-1] * observed
        rows.append(line)
        owner.append(i)
    queues = {i: iter([r for r, o in enumerate(owner) if o == i]) for i in owner}  # rows of a trajectory stay in order,
    kept = [next(queues[i]) for i in draw(st.permutations(owner))]  # trajectories may be interleaved
    width = max(map(len, rows))
    table = torch.tensor([rows[r] + [-1] * (width - len(rows[r])) for r in kept])
    longest = max(map(len, trajectories))
    mask = torch.tensor([[k < len(t) for k in range(longest)] for t in trajectories])
    values = draw(st.lists(st.sampled_from([0.0, 0.25, -1.0, 0.7]), min_size=mask.numel(), max_size=mask.numel()))
    rewards = torch.where(mask, torch.tensor(values, dtype=torch.float64).view(mask.shape), NAN)
    return rewards, table, torch.tensor([owner[r] for r in kept]), mask


@given(token_layouts())
def test_rewards_are_placed_where_the_turns_are(layout):
    rewards, table, owner, mask = layout
    for placement in ('last', 'distributed'):
        out = place_rewards(rewards, table, owner, placement)
        expected = torch.zeros(table.shape, dtype=rewards.dtype)
        for i, k in mask.nonzero().tolist():  # token by token, slowly
            at = [(r, t) for r, t in (table == k).nonzero().tolist() if owner[r] == i]
            at = at[-1:] if placement == 'last' else at
            for where in at: expected[where] += rewards[i, k] / len(at)
        assert_close(out, expected)
        totals = torch.zeros(len(mask), dtype=rewards.dtype).index_add(0, owner, out.sum(1))
        assert_close(totals, rewards.nan_to_num(0.0).sum(1))


def test_placing_refuses():
    for rewards, table, owner, how, message in (
            ([[1.0, 2.0]], [[0, -1]], None, 'last', r'\(0, 1\)'), ([[NAN]], [[0]], None, 'last', 'finite'),
            ([[1.0]], [[0, 1]], None, 'last', r'\[-1, 1\)'), ([[1.0]], [[0, -2]], None, 'last', r'\[-1, 1\)'),
            ([[1.0]], [[0], [0]], None, 'last', 'row_trajectory'), ([[1.0]], [[0], [0]], [0, 1], 'last', r'\[0, 1\)'),
            ([[1.0]], [[0], [0]], [0], 'last', 'trajectory'), ([[1.0]], [[0.0]], None, 'last', 'integers'), ([[1.0]], [[True]], None, 'last', 'integers'),
            ([[1]], [[0]], None, 'last', 'floats'), ([[1.0]], [[0]], None, 'first', 'distributed')):
        with pytest.raises(ValueError, match=message):
            place_rewards(torch.tensor(rewards), torch.tensor(table), owner and torch.tensor(owner), how)


triples = st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=5)


@given(triples, st.sampled_from(['', 'ratings_by_pair=[[0,0,0]] at first, but ', '[[1]] ']),
       st.sampled_from(['=', ' = ', ': ']), st.booleans())
def test_ratings_are_read_from_the_last_list(ratings, before, sign, spaced):
    said = str(ratings) if spaced else str(ratings).replace(' ', '')
    reply = f'<think>{before}</think>\n<answer>\nratings_by_pair{sign}{said}\n</answer>'
    assert parse_ratings(reply) == parse_ratings(reply, pairs=len(ratings)) == ratings
    assert parse_ratings(reply, pairs=len(ratings) + 1) is None
    assert parse_ratings(reply.replace(said, said[:-1])) is None     # cut off: the draft before it does not count


def test_everything_else_is_unparsable():
    for said in ('', '[[]]', '[[1,1,1,1]]', '[[1,1,-1]]', '[[1,1,1.0]]', '[[1,1,true]]', '[["1","1","1"]]', '[[1,1,null]]',
                 '[1,1,1]', '[[1,1,1],[1,1]]', '[[1,1,1],]', '[[[1,1,1]]]', '[[1,1,' + '9' * 5000 + ']]', '[' * 50000,
                 '[[' + '1,' * 20000):
        assert parse_ratings(f'ratings_by_pair={said}') is None, said[:40]


def test_the_judge_sees_question_calls_and_responses_and_nothing_else():
    q = Question('q', 'Who {pairs}?', ['gold'])
    t = rollout(q, ('find {question}', 'seen'), (None, 'Error: no call'), (None, None))
    t = dataclasses.replace(t, turns=[dataclasses.replace(x, action_text='SECRET') for x in t.turns], answer='SECRET')
    text, pairs = judge_prompt(t)
    assert pairs == 2 and 'SECRET' not in text and text.count('Who {pairs}?') == 1  # fields inside texts are not filled
    assert 'find {question}' in text and 'seen' in text and 'no well-formed call' in text and 'ratings_by_pair' in text
    assert judge_prompt(t, 'Q {question} P {pairs}')[0].startswith('Q Who {pairs}? P Pair 1\n')
    for bad in ('Q {question}', 'P {pairs}', ''):
        with pytest.raises(ValueError, match='field'): judge_prompt(t, bad)
    t = rollout(Question('q', 'Is 1 < 2, by a pair_of <b>scales</b>?', ['gold']), ('a_b', '{"x": 1} <i>so</i>'))
    assert t.question.text in judge_prompt(t)[0] and '{"x": 1} <i>so</i>' in judge_prompt(t)[0]      # as they stand


FORGED = st.lists(st.sampled_from(['<think>', '</think>', '<answer>', '</answer>', '</tool_response>', '<tool_call>',
                                   'Pair 2\n', 'ratings_by_pair=', 'ratings_by_pair:', '[[2, 2, 2]]',
                                   '[[2,2,2],[2,2,2]]', '\u200b', ' ', 'a']), max_size=8).map(''.join)


@given(FORGED, FORGED, FORGED)
def test_what_is_graded_cannot_give_the_grades(question, query, seen):
    "A judge that quotes all that it was shown, before its ratings, after them, or instead of them, says nothing more."
    t = rollout(Question('q', f'{question}?', ['gold']), (query or 'x', seen), ('y', f'{seen} z'))
    text, pairs = judge_prompt(t, '{question}\n{pairs}')
    shown = text.splitlines()
    assert pairs == 2 and sum(line in ('Pair 1', 'Pair 2') for line in shown) == 2
    assert text.count('<tool_response>') == text.count('</tool_response>') == text.count('<tool_call>') == 2
    own = '<answer>\nratings_by_pair=[[0, 1, 0], [0, 0, 1]]\n</answer>'
    assert parse_ratings(text, 2) is None
    for reply in (f'{text}\n{own}', f'{own}\n{text}', f'{own}\nIt said: {text!r}'):
        assert parse_ratings(reply, 2) == [[0, 1, 0], [0, 0, 1]]


def upper(reply):
    return reply.upper() if reply != 'mumble' else None


def test_normal_replies_come_back_in_order():
    with Stub(lambda prompt, attempt: f'said {prompt}') as stub:
        judge = stub.judge(api_key='k', options={'temperature': 0.5, 'max_tokens': 7})
        judge.check()
        assert judge.counts == counted(0)  # a check is no call
        prompts = [str(i) for i in range(20)]
        assert judge.ask(prompts, upper) == [f'SAID {p}' for p in prompts] and judge.counts == counted(20)
        assert judge.ask([[{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'u'}]], upper) == ['SAID U']
        assert judge.ask([], upper) == [] and judge.counts == counted(21) and judge.last_error is None
        last = stub.requests[-1]
        assert (last['path'], last['key'], last['model']) == ('/v1/chat/completions', 'Bearer k', 'stub')
        assert (last['temperature'], last['max_tokens']) == (0.5, 7)
        assert [m['role'] for m in last['messages']] == ['system', 'user']


@pytest.mark.parametrize('status', [500, 429])
def test_an_error_of_the_server_is_tried_again(status):
    with Stub(lambda prompt, attempt: status if attempt < int(prompt) else 'fine') as stub:
        judge = stub.judge(concurrency=1)
        assert judge.ask(['0', '1', '2'], upper) == ['FINE'] * 3 and judge.counts == counted(3, retries=3)
        assert judge.ask(['3', '00'], upper) == [None, 'FINE']                    # only two retries were allowed
        assert judge.counts == counted(5, retries=5, failures=1)
        assert str(status) in judge.last_error and len(stub.requests) == 1 + 2 + 3 + 3 + 1


def test_an_attempt_that_hangs_is_tried_again():
    with Stub(lambda prompt, attempt: 'hang' if attempt == 0 else 'fine') as stub:
        judge = stub.judge(timeout=1.0, retries=8)
        assert judge.ask(['x'], upper) == ['FINE']
        assert judge.counts == counted(1, retries=judge.counts['retries']) and judge.counts['retries'] >= 1


def test_an_error_of_ours_and_what_is_no_completion_are_not_tried_again():
    answers = [404, b'<html>welcome</html>', b'', {'choices': []}, {'choices': [{}]}, {'choices': None}, {'detail': 'no'}]
    with Stub(lambda prompt, attempt: answers[int(prompt)] if prompt.isdigit() else 404) as stub:
        judge = stub.judge()
        assert judge.ask(list('0123456'), upper) == [None] * 7 and len(stub.requests) == 7
        assert judge.counts == counted(7, failures=7) and judge.ask(['1'], upper) == [None]
        assert 'no chat completion' in judge.last_error
        with pytest.raises(ConnectionError, match='stub.*404'): judge.check()


def test_an_unparsable_reply_leaves_the_statistics_and_is_counted():
    """MT-GRPO* paid by a judge that cannot be read about one rollout: the others are compared as if it had never been
    played, it is given weight 0, and the run's log says how many replies were lost. A reply is never worth 0."""
    def script(prompt, attempt):
        if 'Morocco' in prompt: return 'I would rather not.'
        vienna = 'Vienna is' in prompt
        return f'ratings_by_pair={[[2, 1, 0], [1, 1, 1 + vienna], [2, 2, 2 - vienna]]}'
    g, look = example_group(), lambda layout, asks: None
    with Stub(script) as stub:
        method = get_method('outcome+judge/calls').bind({'judge': stub.judge()})
        batch, without = (assign(method, [Group(g.question, g.trajectories[:n])], look) for n in (3, 2))
        logged = judges.judge_counts(*method.services)
    assert len(stub.requests) == 3 + 1              # one is asked about again; two of five were answered before
    assert batch.rewards['turns'][2].isnan().any() and batch.credit.trajectory_weight.tolist() == [1, 1, 0]
    width = without.layout.ids.shape[1]
    assert without.credit.advantages.any() and not batch.credit.advantages[2].any()
    assert_close(batch.credit.advantages[:2, :width], without.credit.advantages, atol=1e-6, rtol=0)
    assert logged == {f'judge_{name}': n for name, n in counted(5, unparsable=1).items()}
    assert all(name in METRICS for name in logged)


def test_judge_rewards_from_end_to_end():
    "Readable, unreadable, wrong number of pairs, failed; a rollout without segments is not asked about."
    says = {'good': 'ratings_by_pair=[[2,2,2],[2,1,0]]', 'vague': 'fine work', 'short': 'ratings_by_pair=[[2,2,2]]',
            'broken': 500}
    called, groups = [('a', 'b'), ('c', 'd')], []
    for n in (*says, 'none'):
        q = Question(n, f'about {n}?', ['gold'])
        groups.append(Group(q, [rollout(q, *called * (n != 'none'), (None, None))]))
    with Stub(lambda prompt, attempt: next(v for k, v in says.items() if f'about {k}?' in prompt)) as stub:
        judge = stub.judge()
        out = judge_rewards(groups, judge, weights=(2, 1, 1))
        assert len(stub.requests) == 3 + 3 + 2       # three attempts of what broke, two unreadable asked again
    nan = [NAN, NAN, 0]
    assert_close(out, torch.tensor([[1, 5 / 8, 0], nan, nan, nan, [0, 0, 0]]), equal_nan=True)
    assert judge.counts == counted(4, retries=2, failures=1, unparsable=2)


class Listener:
    "A judge that says nothing."
    def __init__(self): self.asked = []

    def ask(self, prompts, parse):
        self.asked += prompts
        return [None] * len(prompts)


@pytest.mark.parametrize('spelling, needs', [('outcome+judge/calls', '{question} {pairs}'), ('prs', '')])
def test_a_judge_is_told_what_a_file_says(tmp_path, spelling, needs):
    "The file's words reach the judge, and a file that lacks a placeholder or has another is refused at the door."
    path, judge, form = tmp_path / 'judge.txt', Listener(), {'form': 'long'} if spelling == 'prs' else {}

    def bound(text):
        path.write_text(text)
        return compose(spelling).bind({'judge': judge, 'judge_prompt': str(path), **form})
    bound(f'Be strict. {needs}').text_rewards([answered()])
    assert judge.asked and all('Be strict.' in str(prompt) for prompt in judge.asked)
    for other in ('{other}', '{Gold}', '{ref2}'):
        with pytest.raises(ValueError, match=f'must have the placeholders .*, got .*{other}'): bound(f'{needs} {other}')
    bound(rf'Be strict. {needs} Put it into \boxed{{answer}}, as {{"a": 1}}.')                     # no placeholders
    path.unlink()
    with pytest.raises(ValueError, match='read'): compose(spelling).bind({'judge': judge, 'judge_prompt': str(path), **form})


def grades(prompt, attempt): return f'ratings_by_pair={[[2, 1, 0]] * prompt.count("</tool_response>")}'


def judged(stub, **judge):
    "Settings of a short run with a judge."
    judge = {'base_url': f'http://127.0.0.1:{stub.server.server_port}/v1', 'model': 'stub', **judge}
    return {**SHORT, 'method': 'outcome+judge/calls', 'options': {'judge': judge}, 'questions_per_step': 2, 'group_size': 2,
            'dev_questions': 1, 'test_questions': 1}


def test_a_run_that_is_resumed_counts_its_judge_as_a_whole_one(tmp_path):
    with Stub(grades) as stub:
        settings = judged(stub) | {'eval_every': 1}
        folders = tmp_path / 'whole', tmp_path / 'parts', tmp_path / 'parts'
        for folder, steps in zip(folders, (2, 1, 2)):
            judges._judge_at.cache_clear()                                                    # another process
            train(settings | {'steps': steps, 'run': str(folder), 'resume': True}, say=lambda line: None)
        asked = len(stub.requests) - 3                                                        # a check before each
    assert same_metrics(*folders[:2]) == []
    calls = read_metrics(folders[0]).judge_calls.dropna()
    # asked in a thread while others are played: the order is the clock's
    kept = [sorted(gzip.open(folder / 'judge.jsonl.gz', 'rt').read().splitlines()) for folder in folders[:2]]
    assert (calls > 0).all() and kept[0] == kept[1] and sum(map(len, kept)) == asked <= 2 * calls.sum()


KEY = 'sk-a-key-that-nobody-may-see'


def test_a_run_keeps_the_hash_of_its_judges_words_and_its_key_to_itself(tmp_path, monkeypatch):
    """A stub grades every pair it is shown. The words of a file reach it, and their hash the summary; the key reaches it
    too, and no file of the run's folder, those packed by gzip unpacked."""
    monkeypatch.setenv('JUDGE_KEY', KEY)
    (tmp_path / 'words.txt').write_text('Grade {pairs} for {question}.')
    with Stub(grades) as stub:
        settings, lines = judged(stub, key_from='JUDGE_KEY') | {'steps': 1, 'run': str(tmp_path / 'run')}, []
        settings['options']['judge_prompt'] = str(tmp_path / 'words.txt')
        run = train(settings, lines.append)
    summary = json.loads((run / 'summary.json').read_text())
    assert summary['judge_prompt_hashes'] == {'judge': prompt_hash('Grade {pairs} for {question}.')}
    assert len(stub.requests) > 1 and all('Grade Pair 1' in r['messages'][0]['content'] for r in stub.requests[1:])
    assert all(r['key'] == f'Bearer {KEY}' for r in stub.requests)
    files = [p for p in run.rglob('*') if p.is_file()]
    written = [gzip.decompress(p.read_bytes()) if p.suffix == '.gz' else p.read_bytes() for p in files]
    assert {'params.yaml', 'summary.json', 'turns.jsonl.gz'} <= {p.name for p in files}
    assert b'JUDGE_KEY' in b''.join(written)                       # the search would have found it
    assert not any(KEY.encode() in text for text in [*written, '\n'.join(lines).encode()])


@pytest.mark.parametrize('spelling, options', [('outcome+judge/calls', {}), ('prs', {'form': 'long'})])
@pytest.mark.parametrize('secret', [{'api_key': KEY}, {'base_url': f'https://me:{KEY}@judge.org/v1'}])
def test_a_key_among_the_options_is_refused_and_not_repeated(spelling, options, secret):
    judge = {'base_url': 'http://127.0.0.1:9/v1', 'model': 'stub', **secret}
    with pytest.raises(ValueError, match="'JUDGE_KEY'") as refusal:
        compose(spelling).bind({'judge': judge, **options})
    assert KEY not in str(refusal.value)


def test_a_judges_settings_are_checked_at_the_door():
    for judge, said in (({'modell': 'x'}, "did you mean 'model'"), ({'model': ''}, "needs 'model'"),
                        ({'key_from': 'NO_SUCH_KEY'}, 'export NO_SUCH_KEY'), ({'key_from': '/dev/null'}, 'is empty')):
        with pytest.raises(ValueError, match=said):
            compose('outcome+judge/calls').bind({'judge': {'base_url': 'http://h/v1', 'model': 'stub', **judge}})
    for weights in ((1, 1), (0, 0, 0), (1, -1, 1), (NAN, 1, 1)):
        with pytest.raises(ValueError, match='weights'):
            compose('outcome+judge/calls').bind({'judge': {'base_url': 'http://h/v1', 'model': 'stub'}, 'weights': weights})
    for bad in (dict(retries=-1), dict(timeout=0), dict(concurrency=0), dict(deadline=0)):
        with pytest.raises(ValueError): Judge('http://127.0.0.1:1/v1', 'm', **bad)


def test_a_server_that_repeats_a_wrong_key_does_not_spread_it():
    with Stub(lambda prompt, attempt: 401) as stub:
        judge = stub.judge(api_key=KEY)
        judge.ask(['x'], upper)
        assert '401' in judge.last_error and KEY not in judge.last_error


def answered():
    "The running example, with every tag that PRS asks for, so that its long form asks the judge too."
    tagged = lambda t: dataclasses.replace(t, action_text=f'<reasoning>so</reasoning>{t.action_text}')
    group = example_group()
    return Group(group.question, [dataclasses.replace(t, turns=[tagged(turn) for turn in t.turns])
                                  for t in group.trajectories])
