"""53_sharded: a learner behind DeepSpeed takes the plain one's steps, at every ZeRO stage, on one rank and on two."""
import importlib.util
import os

import pytest
import torch
from torch.testing import assert_close

if not importlib.util.find_spec('deepspeed'):
    pytest.skip('deepspeed is not installed: pip install credit_rl[train]', allow_module_level=True)

import deepspeed_steps
from started import on_ranks

from credit_rl.layout import pack
from credit_rl.learner import deal
from credit_rl.tiny import tiny_tokenizer

# ranks: the stages they run; those without pieces of weights in the nightly job (stage 2 by day: test_launch, one_rank)
STAGES = {1: (2, 3), 2: (0, 1, 2, 3)} if os.environ.get('NIGHTLY') else {1: (3,), 2: (3,)}
RUNS = [(ranks, stage) for ranks, stages in STAGES.items() for stage in stages]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]     # the first test makes what all of them read


@pytest.fixture(scope='module')
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope='module')
def results(tmp_path_factory, one_thread):
    "Results of each rank by the number of ranks, all made when the first is asked for; each goes on from the other's."
    done = {}
    def get(ranks):
        if not done:
            alone, both = (tmp_path_factory.mktemp(f'ranks{n}') for n in (1, 2))
            found = deepspeed_steps.at_stages(STAGES[1], alone / 'out.pt', offload=('reference', 'teacher'))
            done[2] = on_ranks(deepspeed_steps.__file__, 2, both / 'out.pt', alone / 'out.pt', *STAGES[2])
            for stage in STAGES[1]:
                found[stage] |= deepspeed_steps.go_on(stage, f'{both / "out.pt"}-{stage}')
            done[1] = [found]
        return done[ranks]
    return get


@pytest.fixture(scope='module')
def plain(one_thread):
    return deepspeed_steps.plain()


def assert_same_logs(logs, expected, atol, rtol):
    "Logs within atol; `rtol` is for the gradient's norm alone, whose size is not one of a loss."
    assert [set(log) for log in logs] == [set(log) for log in expected]
    for i, (log, wanted) in enumerate(zip(logs, expected)):
        for name in log:
            assert_close(float(log[name]), float(wanted[name]), atol=atol, rtol=rtol if 'grad_norm' in name else 0,
                         msg=lambda text: f'step {i}, {name}: {text}')


@pytest.mark.parametrize('case', ['grpo', 'tspo', 'sgd', 'additions'])
@pytest.mark.parametrize('ranks, stage', RUNS)
def test_steps_are_those_of_the_plain_learner(results, plain, ranks, stage, case):
    got, wanted = results(ranks)[0][stage][case], plain[case]
    assert_same_logs(got['logs'], wanted['logs'], atol=1e-4, rtol=1e-5)
    assert_close(got['weights'], wanted['weights'], atol=1e-4 if case != 'sgd' else 1e-5, rtol=0)
    for name in ('logp', 'one'): assert_close(got[name], wanted[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize('dtype', ['bad', 'bad bfloat16'])
@pytest.mark.parametrize('ranks, stage', RUNS)
def test_a_gradient_that_is_not_finite_moves_nothing(results, plain, ranks, stage, dtype):
    "Also without ZeRO. All ranks stop alike and name the trajectories, or skip that update."
    wanted, found = plain['bad'], [rank[stage][dtype] for rank in results(ranks)]
    assert wanted['logs'][0]['bad_updates'] == 1 == wanted['logs'][0]['updates'] and wanted['finite']
    assert 'bad_updates' not in wanted['logs'][1] and wanted['why'][1]
    for got in found:
        assert [log.get('bad_updates') for log in got['logs']] == [1, None] and got['finite']
        assert 'the gradient is not finite' in got['why'][0] and got['why'][1] == wanted['why'][1]
        close = dict(atol=1e-4, rtol=0) if dtype == 'bad' else dict(atol=.01, rtol=.02)
        assert_close(got['weights'], {n: w.to(got['weights'][n].dtype) for n, w in wanted['weights'].items()}, **close)


@pytest.mark.parametrize('stage', STAGES[1])
def test_a_strangers_checkpoint_runs_nothing(results, stage):
    "Harm in any file of it, however it is read: to go on, to take the policy, to go on with other ranks."
    said = dict(results(1)[0][stage]['stranger'])
    assert said.pop('harmed') is False and len(said) == 6
    for found in said.values(): assert 'might run any program' in found


def assert_learned_the_same(got, wanted):
    assert_same_logs(got['logs'], wanted['logs'], atol=1e-4, rtol=1e-4)
    assert_close(got['weights'], wanted['weights'], atol=1e-4, rtol=0)


@pytest.mark.parametrize('ranks, stage, case',
                         [(*run, (name, 'adamw')) for run in RUNS for name in deepspeed_steps.METHOD_CASES]
                         + [(*run, (name, 'sgd')) for run in RUNS if run[1] > 1 for name in deepspeed_steps.LETTER])
def test_methods_learn_the_same(results, plain, ranks, stage, case):
    "Losses and weights within 1e-4 over five steps, a refreshed teacher and a restored checkpoint among them."
    got, wanted = results(ranks)[0][stage][case], plain[case]
    assert len(got['logs']) == deepspeed_steps.STEPS == 5
    assert_learned_the_same(got, wanted)
    for one, other in zip(got['seen'], wanted['seen']):
        assert set(one) == set(other)
        # sums over an answer's tokens
        for name in one: assert_close(one[name], other[name], atol=1e-3, rtol=1e-4, equal_nan=True)


def test_a_refreshed_teacher_is_seen(plain):
    "The teacher says the same over two steps, then what the policy of the second said."
    said = [seen['teacher_logp'].nan_to_num() for seen in plain['tips', 'adamw']['seen']]
    assert torch.equal(said[0], said[1]) and torch.equal(said[2], said[3]) and (said[1] - said[2]).abs().max() > 1e-2


def test_the_batches_are_what_they_should_be(plain):
    "Some of one trajectory only, none without credit unless a KL term moves; one in two rows."
    assert [log['updates'] for log in plain['grpo']['logs']] == [2] * deepspeed_steps.STEPS + [1, 0]
    assert [log['updates'] for log in plain['tspo']['logs']] == [2] * (deepspeed_steps.STEPS + 2)
    layout = deepspeed_steps.tspo()[0]
    assert len(layout.ids) == len(layout.groups) + 1 and layout.groups.bincount().tolist() == [4, 2, 3, 4]
    assert max(log['clip_fraction'] for log in plain['sgd']['logs']) > 0


def test_the_methods_batch_leaves_a_rank_without_rows_and_moves_the_weights(plain):
    "By far more than the tolerance, in rows of unequal lengths."
    groups = deepspeed_steps.method_batch()
    layout, begun = pack(groups), dict(deepspeed_steps.model(0, len(tiny_tokenizer()), True).named_parameters())
    assert [len(part) for part in torch.arange(len(layout.groups)).tensor_split(3)
            ] == [2, 2, 1] and layout.groups.bincount().tolist() == [3, 2]
    assert len(layout.ids) == 6 and len(set(layout.lengths.tolist())) > 2 and deal([5], 99, 2) == [[[0]], [[]]]
    for name in deepspeed_steps.LETTER:
        for how in ('adamw', 'sgd'): assert [log['updates'] for log in plain[name, how]['logs']] == [3] * 5, name
        assert max((w - plain[name, 'sgd']['weights'][n]).abs().max() for n, w in begun.items()) > 5e-3, name


def test_ranks_agree(results):
    first, second = results(2)
    assert (first['rank'], second['rank']) == (0, 1) and first['ranks'] == second['ranks'] == 2
    for stage in STAGES[2]:
        for case in ('grpo', 'tspo', 'sgd', 'additions'):
            assert first[stage][case]['logs'] == second[stage][case]['logs']
            for name in ('logp', 'one', 'weights'):
                assert_close(first[stage][case][name], second[stage][case][name], atol=0, rtol=0)


@pytest.mark.parametrize('ranks, stage', RUNS)
def test_a_restored_learner_goes_on_as_if_nothing_had_happened(results, ranks, stage):
    went_on, restored = results(ranks)[0][stage]['resumed']
    assert went_on == restored and went_on[0]['updates'] == 2


@pytest.mark.parametrize('ranks, stage', [run for run in RUNS if run[1] > 1])
def test_an_offloaded_optimiser_takes_the_same_steps_and_is_restored(results, plain, ranks, stage):
    "Up to the rounding of a norm added up otherwise; from a checkpoint the very same."
    found = results(ranks)[0][stage]['offloaded']
    assert 'cpu' in found['where']
    assert_same_logs(found['logs'], found['logs here'], atol=2e-6, rtol=2e-6)
    assert_close(found['weights'], found['weights here'], atol=2e-6, rtol=0)
    assert_same_logs(found['logs'], plain['tspo']['logs'][:deepspeed_steps.STEPS], atol=1e-4, rtol=1e-5)
    assert found['again'] == found['logs'][3:] and assert_close(found['weights again'], found['weights'], atol=0,
                                                                rtol=0) is None


@pytest.mark.parametrize('ranks, stage', [run for run in RUNS if run[1] > 1])
def test_an_offloaded_optimiser_moves_nothing_that_a_loss_does_not_reach(results, plain, ranks, stage):
    "Output embeddings at the critic's steps, whose last gradient, the policy's, still lies in the host's memory."
    assert_learned_the_same(results(ranks)[0][stage]['offloaded']['untied'], plain[deepspeed_steps.UNTIED, 'adamw'])


def test_weights_that_a_critic_does_not_reach_would_be_moved_by_far_more_than_the_tolerance(plain):
    "By 3.7 % in its fifteen steps. Each has counted its own: three of the policy's are missing."
    weights = plain[deepspeed_steps.UNTIED, 'adamw']['weights']
    logs = plain[deepspeed_steps.UNTIED, 'adamw']['logs']
    assert (1 - (1 - 5e-4 * 5) ** 15) * weights['lm_head.weight'].abs().max() > 1e-3
    assert not torch.equal(weights['lm_head.weight'], weights['model.embed_tokens.weight'])
    assert ['grad_norm' in log for log in logs] == [True, False, True, True, True]
    assert all('critic_grad_norm' in log and log['updates'] == 3 for log in logs)


@pytest.mark.parametrize('ranks, stage', RUNS)
def test_a_checkpoint_over_other_groups_of_weights_is_refused(results, ranks, stage):
    for rank in results(ranks):
        assert "AdamW steps over 3 groups of weights, this learner's over 2" in rank[stage]['refused']


def assert_goes_on(got, wanted):
    assert_same_logs(got[0], wanted[0], atol=1e-4, rtol=1e-4)
    assert_close(got[1], wanted[1], atol=1e-5, rtol=0)
    assert got[0][0]['updates'] == 2


@pytest.mark.parametrize('stage', STAGES[1])
def test_one_rank_goes_on_where_two_stopped(results, stage):
    "Policy, AdamW's averages and steps, and the order of trajectories: the next step is that of the two ranks."
    assert_goes_on(results(1)[0][stage]['other number of ranks'], results(2)[0][stage]['went on'])


@pytest.mark.parametrize('stage', STAGES[1])
def test_two_ranks_go_on_where_one_stopped(results, stage):
    for rank in results(2): assert_goes_on(rank[stage]['other number of ranks'], results(1)[0][stage]['went on'])


@pytest.mark.parametrize('case', ['carl', deepspeed_steps.UNTIED])
@pytest.mark.parametrize('stage', STAGES[1])
def test_a_critic_that_steps_apart_goes_on_on_another_number_of_ranks(results, plain, stage, case):
    "Averages and numbers of steps for each loss: steps 4 and 5 are the plain learner's."
    wanted = plain[case, 'adamw']
    for ranks in (1, 2):
        got = results(ranks)[0][stage]['apart, other number of ranks'][case]
        assert_same_logs(got['logs'], wanted['logs'][3:], atol=1e-4, rtol=1e-4)
        assert_close(got['weights'], wanted['weights'], atol=1e-4, rtol=0)
        assert all(log['critic_grad_norm'] > 0 for log in got['logs'])


@pytest.mark.parametrize('ranks, stage', RUNS)
def test_bfloat16_is_near_with_exact_positions_and_a_reference_like_the_policy(results, plain, ranks, stage):
    half = results(ranks)[0][stage]['bfloat16']
    assert_same_logs(half['logs'], plain['grpo']['logs'][:deepspeed_steps.STEPS], atol=.01, rtol=.02)
    assert half['logs'] != plain['grpo']['logs'][:deepspeed_steps.STEPS] and half['buffers'] == ['torch.float32']
    assert half['apart'] == 0 and half['went on'] == half['resumed']
    # AdamW's steps are the updates: at stage 0 DeepSpeed's own first one is not among them
    assert half['counted'] == [2. * deepspeed_steps.STEPS]


@pytest.mark.parametrize('ranks, stage', RUNS)
def test_the_weights_that_are_left_of_a_checkpoint_are_its_policys(results, ranks, stage):
    "The learners had gone one step further, and nothing goes on from what is left."
    for rank in results(ranks):
        whole, light = rank[stage]['light']
        assert_close(light, whole, atol=0, rtol=0)


@pytest.mark.parametrize('ranks, stage', RUNS)
def test_a_critics_head_in_bfloat16_is_exact_and_alike_on_all_ranks(results, plain, ranks, stage):
    "Near the plain learner's in float32, as near as the backbone in bfloat16 lets it be; it goes on from a checkpoint."
    found, wanted = [rank[stage]['exact'] for rank in results(ranks)], plain['carl', 'adamw']
    for rank in found:
        assert {w.dtype for w in rank['head'].values()} == {torch.float32}
        assert_close(rank['head'], found[0]['head'], atol=0, rtol=0)
    for name, weight in wanted['head'].items():      # AdamW turns a small gradient of another sign into a whole step
        assert (found[0]['head'][name] - weight).abs().mean() < .003
    assert_same_logs(found[0]['logs'], wanted['logs'], atol=.02, rtol=.1)


@pytest.mark.parametrize('stage', STAGES[1])
def test_a_critics_head_in_bfloat16_goes_on_on_another_number_of_ranks(results, stage):
    "The last two steps; AdamW moved its weights by some 0.04 in all."
    for ranks, other in ((1, 2), (2, 1)):
        got, wanted = results(ranks)[0][stage]['exact, other number of ranks'], results(other)[0][stage]['exact']
        assert_same_logs(got['logs'], wanted['logs'][3:], atol=.005, rtol=.05)
        assert_close(got['head'], wanted['head'], atol=2e-3, rtol=0)
