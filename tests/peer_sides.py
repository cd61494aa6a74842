"""What each side of `bench_peers.py` runs, in a process of its own. A side is a function (size) → dict of what was
measured; `SIDES` has them by name. Where one goes without a package that it needs, it raises ImportError.

    python tests/peer_sides.py 'loop tiny/credit_rl' [--small]

Prints `MEASURED {…}`: processor and clock seconds of what is timed, what was made meanwhile (trajectories, trained
tokens), and bytes: `peak`, the largest resident size of the process, and `before`, what it was when all was set up.
"""
import argparse
import dataclasses
import json
import os
import random
import re
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]   # a checkout will do

BASE = Path(__file__).resolve().parents[1] / 'data' / 'tiny_base'
WORDS, PROMPT, TURN, SEEN, TURNS = 8192, 150, 100, 150, 6   # of long trajectories: 150 + 6 · 100 + 5 · 150 = 1,500


def peak():
    "Largest resident size of this process so far, in bytes."
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


class Clock:
    "Processor and clock seconds, added up over the times between `start` and `stop`."
    def __init__(self): self.processor = self.clock = 0.
    def start(self): self.since = time.process_time(), time.perf_counter()
    def stop(self):
        self.processor += time.process_time() - self.since[0]
        self.clock += time.perf_counter() - self.since[1]
    def times(self): return {'processor': self.processor, 'clock': self.clock}


# ---- the two games ----

@dataclasses.dataclass
class Game:
    "What both sides play and learn: the same model, questions, search and sizes."
    model: object
    tokenizer: object
    questions: list
    env: object           # Environment
    group: int            # rollouts of a question
    per_step: int         # questions of a step
    turn_tokens: int
    updates: int          # of the optimiser in a step
    micro: int            # rows in a forward with gradient
    row_tokens: int       # the same in tokens
    reads: object         # text of a turn → the query of its call, None where it has none
    reward: object        # (the last turn's text, its ids, golds) → float
    ends: tuple           # tokens that end a turn

    @property
    def rows(self): return self.group * self.per_step


def tiny_game(small):
    "The stored tiny base in the tiny world: 192 rollouts a step of at most four turns, as in the demo."
    from credit_rl.metrics import exact_match
    from credit_rl.models import load_model
    from credit_rl.protocol import PROTOCOLS, Chat
    from credit_rl.tiny import tiny_environment
    from credit_rl.world import make_world
    model, tokenizer = load_model(str(BASE))
    world = make_world('train', seed=3, questions=300)
    env = dataclasses.replace(tiny_environment(world, Chat(PROTOCOLS['tiny'], tokenizer)), malformed='end')

    def reads(text):
        call = re.search(r'<tool_call>((?:(?!<tool_call>).)*)</tool_call>\s*\Z', text, re.S)
        return call and call[1].strip() or None

    def reward(text, ids, golds):
        answer = re.search(r'<answer>((?:(?!<answer>).)*)</answer>\s*\Z', text, re.S)
        return float(exact_match(answer[1].strip(), list(golds))) if answer else 0.
    per_step, group = (2, 4) if small else (24, 8)
    return Game(model, tokenizer, world.questions, env, group, per_step, 24, 2, per_step * group // 6 or 4, 4096,
                reads, reward, ('</tool_call>', '</answer>'))


def word_tokenizer():
    "A word-level tokenizer of as many words as the random model has: tags, roles, and w0, w1, …"
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from credit_rl.protocol import CHATML
    tags = [f'<{s}{t}>' for t in ('think', 'tool_call', 'tool_response', 'answer') for s in ('', '/')]
    words = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<unk>', *tags, 'system', 'user', 'assistant']
    words += [f'w{i}' for i in range(WORDS - len(words))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token='<unk>'))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_tokens(tags)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token='<|im_end|>', pad_token='<|endoftext|>',
                                   unk_token='<unk>', additional_special_tokens=['<|im_start|>'], chat_template=CHATML)


def long_game(small):
    """A random model of 15 M parameters, trajectories of 1,500 tokens: a prompt of 150, six turns of 100, each but the
    last a search whose answer takes 150. Every turn counts as a call, since a random model writes none; its query is
    the eight words that it wrote first. The reward is drawn from the ids, so that no group is all alike."""
    from bench_scoring import random_model
    from credit_rl.protocol import PROTOCOLS, Action, Chat
    from credit_rl.readers import Passage
    from credit_rl.retrieval import BM25
    from credit_rl.rollout import Environment
    from credit_rl.tools import SearchTool, render_plain
    from credit_rl.trajectory import Question
    model, tokenizer, rng = random_model(), word_tokenizer(), random.Random(0)
    words = [w for w in tokenizer.get_vocab() if re.fullmatch(r'w\d+', w)]
    words.sort()
    said = lambda n: ' '.join(rng.choices(words, k=n))
    around = 6 if small else 9
    length = (lambda n: max(12, n // 10)) if small else (lambda n: n)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    reads = lambda text: ' '.join(re.findall(r'\bw\d+', text)[:8]) or 'w0'

    class Calls(Chat):
        def parse(self, text, why='stop'): return Action(call={'name': 'search', 'queries': [reads(text)]})
    pages = [Passage(str(i), '', said(length(SEEN) - around)) for i in range(2000)]
    tool = SearchTool(BM25(pages, progress=False), k=1, max_tokens=None, render=render_plain, empty=pages[0].text)
    protocol = dataclasses.replace(PROTOCOLS['tiny'], name='every turn calls')
    env = Environment(Calls(protocol, tokenizer), tool, max_turns=TURNS, max_tokens=4096)
    questions = [Question(str(i), said(length(PROMPT) - 5), ('gold',)) for i in range(64)]
    return Game(model, tokenizer, questions, env, 4, 2, length(TURN), 1, 4, 4 * length(1500) + 64, reads,
                lambda text, ids, golds: sum(ids) % 97 / 97, ())


GAMES = {'loop tiny': (tiny_game, 5), 'loop long': (long_game, 1)}   # and how many steps are timed


def played(groups):
    "What was made in rollouts: trajectories, trained tokens and all tokens, turns."
    every = [t for g in groups for t in g.trajectories]
    return {'trajectories': len(every), 'trained': sum(len(u.action_ids) for t in every for u in t.turns),
            'turns': sum(len(t.turns) for t in every),
            'tokens': sum(len(t.prompt_ids) + sum(len(u.action_ids) + len(u.observation_ids) for u in t.turns)
                          for t in every)}


def add(made, more):
    for name, n in more.items(): made[name] = made.get(name, 0) + n


# ---- the loops ----

def our_loop(case, small, **settings):
    "`train_step` of credit_rl.train as a run calls it: rollout, credit, update, metrics and the log of rollouts."
    from credit_rl import train
    from credit_rl.engine import HFEngine
    from credit_rl.runlog import RunLog
    from credit_rl.settings import make_config, settings_of
    from credit_rl.stage import Stage, make_learner, origin_of
    make, steps = GAMES[case]
    game = make(small)
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(dict(
            model=str(BASE), method='grpo', average='token-mean', run=f'{folder}/run', track='', steps=steps,
            questions_per_step=game.per_step, group_size=game.group, learning_rate=1e-6, minibatches=game.updates,
            row_tokens=game.row_tokens, turn_tokens=game.turn_tokens, **settings))
        s = settings_of(config)
        stage = Stage(game.env.chat, game.model, {'train': game.questions}, {'train': game.env})
        engine = HFEngine(game.model, game.tokenizer, max_length=game.env.max_tokens)
        with RunLog(config.run) as log:
            learner = make_learner(s, origin_of(s.course, s.acting, s.host, s.critic), game.model)
            run = train.Run(config, stage, engine, learner, log, say=lambda line: None)
            outcome = run.method.rewards[0]
            earned = lambda groups, options: torch.tensor(
                [game.reward(t.turns[-1].action_text, t.turns[-1].action_ids, g.question.answers)
                 for g in groups for t in g.trajectories])
            run.method = dataclasses.replace(run.method, rewards=(dataclasses.replace(outcome, text=earned),))
            keep, made = train.rollout, {}

            def counted(*given):
                groups = keep(*given)
                add(made, played(groups))
                return groups
            train.rollout = counted
            clock = Clock()
            before = peak()
            for step in range(0, steps + 1):                               # step 0 warms up and is not counted
                if step == 1: made.clear()
                clock.start()
                with log.timed('step'): metrics = train.train_step(run, step + 1)
                log.metrics(step + 1, **metrics)
                if step: clock.stop()
                updates = metrics['updates']
            return {**clock.times(), **made, 'updates': updates * steps, 'before': before, 'peak': peak()}


TEMPLATE = """{% for m in messages %}{% if m['role'] == 'tool' %}<|im_end|>
<|im_start|>user
<tool_response> {{ m['content'] }} </tool_response><|im_end|>
{% else %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<tool_call> {{ c['function']['name'] }} {% for k, v in c['function']['arguments'].items() %}{{ k }} {{ v }} {% endfor %}</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""   # what stands between two turns in credit_rl's rollouts, token by token


def trl_environment(game):
    "A class as TRL's `environment_factory` wants one: a tool that searches as the other side's does."
    class Searching:
        def reset(self, **row): return None

        def search(self, query: str) -> str:
            """Search the pages.

            Args:
                query: What to look for.

            Returns:
                The page found.
            """
            return game.env.tool.run([q.strip() for q in query.split(';') if q.strip()])
    return Searching


def trl_tokenizer(game):
    "The game's tokenizer with a template that shows tools, which reads a turn's call as the game does."
    tokenizer = game.tokenizer
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {}

    def parse_response(ids, prefix=None, tools=None):
        text = tokenizer.decode(ids)
        query, said = game.reads(text), {'role': 'assistant', 'content': text}
        if query is None: return said
        return {**said, 'tool_calls': [{'type': 'function', 'function': {'name': 'search',
                                                                         'arguments': {'query': query}}}]}
    tokenizer.parse_response = parse_response
    return tokenizer


def trl_loop(case, small, **settings):
    "TRL's GRPOTrainer with `environment_factory`, as its user would run it."
    os.environ.setdefault('TRL_EXPERIMENTAL_SILENCE', '1')
    import datasets
    import transformers
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from credit_rl.stage import draw_questions
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    warnings.simplefilter('ignore')
    make, steps = GAMES[case]
    game = make(small)
    tokenizer, parts = trl_tokenizer(game), game.updates
    asked = [q for step in range(steps + 1) for q in draw_questions(game.questions, game.per_step, step + 1, 0)]
    data = datasets.Dataset.from_list([{'prompt': [{'role': 'user', 'content': q.text}], 'golds': list(q.answers)}
                                       for q in asked])
    game.model.generation_config.eos_token_id = [tokenizer.eos_token_id,
                                                 *tokenizer.convert_tokens_to_ids(list(game.ends))]
    made, clock, before = {}, Clock(), []

    def outcome(completions, completion_ids, golds, **columns):
        said = [c[-1]['content'] for c in completions]
        turns = sum(m['role'] == 'assistant' for c in completions for m in c)
        add(made, {'trajectories': len(said), 'turns': turns})
        return [game.reward(text, ids, gold) for text, ids, gold in zip(said, completion_ids, golds)]

    class Timed(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            if state.global_step == 0: before.append(peak())
            if state.global_step % parts == 0: clock.start()
            if state.global_step == parts: made.clear()

        def on_step_end(self, args, state, control, **others):
            if state.global_step % parts == 0 and state.global_step > parts: clock.stop()

    class Counting(GRPOTrainer):
        "Counts what was generated, and changes nothing."
        def _generate_and_score_completions(self, inputs):
            out = super()._generate_and_score_completions(inputs)
            add(made, {'trained': int((out['completion_mask'] * out.get('tool_mask', 1)).sum()),
                       'tokens': int(out['prompt_mask'].sum() + out['completion_mask'].sum())})
            return out
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder, max_steps=(steps + 1) * parts, num_generations=game.group, per_device_train_batch_size=game.micro,
            gradient_accumulation_steps=game.rows // parts // game.micro,
            steps_per_generation=game.rows // game.micro, max_completion_length=game.env.max_tokens - 16,
            max_tool_calling_iterations=game.env.max_turns - 1, loss_type='dapo', beta=0., temperature=1.,
            learning_rate=1e-6, lr_scheduler_type='constant', adam_beta2=.95, max_grad_norm=1.,
            generation_kwargs={'max_new_tokens': game.turn_tokens}, bf16=False, shuffle_dataset=False,
            logging_strategy='no', save_strategy='no', report_to='none', disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=torch.cuda.is_available(),
            **{'gradient_checkpointing': False, **settings})
        trainer = Counting(model=game.model, reward_funcs=[outcome], args=arguments, train_dataset=data,
                           processing_class=tokenizer, environment_factory=trl_environment(game), callbacks=[Timed()])
        trainer.train()
    return {**clock.times(), **made, 'updates': steps * parts, 'before': before[0], 'peak': peak()}


SIDES = {}
for case in GAMES:
    SIDES[f'{case}/credit_rl'] = lambda small, case=case: our_loop(case, small)
    SIDES[f'{case}/trl'] = lambda small, case=case: trl_loop(case, small)
SIDES['loop long/credit_rl, checkpointing'] = lambda small: our_loop('loop long', small, gradient_checkpointing=True)
SIDES['loop long/trl, checkpointing'] = lambda small: trl_loop('loop long', small, gradient_checkpointing=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('side', choices=sorted(SIDES))
    parser.add_argument('--small', action='store_true', help='a toy of the same shape, for tests')
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try: found = SIDES[a.side](a.small)
    except ImportError as e: sys.exit(f'needs what is not here: {e}')
    print('MEASURED', json.dumps(found), flush=True)


if __name__ == '__main__':
    main()
