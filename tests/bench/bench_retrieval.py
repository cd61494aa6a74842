"""How much faster is BM25 (bm25s) than rank_bm25, in one run on one machine, and how much memory does its index take?

    python tests/bench/bench_retrieval.py [--passages 100000] [--queries 400] [--slow-queries 20]
    python tests/bench/bench_retrieval.py --shards --passages 1000000
    python tests/bench/bench_retrieval.py --clients 100 [--workers 2]

Passages are synthetic: words drawn by Zipf's law, as many as a block of Wikipedia has. Both search the same corpus,
with the same
words and parameters, for the same queries in the same process; scores are compared before they are timed.

What a million passages take is extrapolated: bytes measured at this many passages, times a million over their number.
Scores and
texts grow in proportion; the vocabulary grows more slowly, so that its figure is an upper bound. The peak of building
is the largest
resident size of the process while the index is built less its size just before, when it held the passages.

With --shards the passages are made one at a time and indexed by build_index: nothing is compared, no list of passages
is held, and what is measured at that many passages is printed, with what 21 million of them would take in proportion.
With --clients the index is served by `credit-rl serve`, and so many clients ask at once, each after one client alone.
"""
import argparse
import gc
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from credit_rl.readers import Passage
from credit_rl.retrieval import BM25, RankBM25, build_index
from credit_rl.search_service import SearchClient


def corpus(passages, length, vocabulary, rng):
    "Passages of about `length` words, the r-th most frequent word with weight 1 / (r + 10)."
    weight = 1 / (np.arange(vocabulary) + 10)
    lengths = rng.integers(length // 2, length * 3 // 2, passages)
    ids = rng.choice(vocabulary, lengths.sum(), p=weight / weight.sum())
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    return [Passage(str(i), f'title{i}', ' '.join(f'w{j}' for j in part)) for i, part in enumerate(parts)]


def questions(passages, number, words, rng):
    "Queries of `words` words, each drawn from one passage."
    texts = [passages[i].text.split() for i in rng.integers(0, len(passages), number)]
    return [' '.join(rng.choice(t, words)) for t in texts]


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak():
    "Largest resident size of this process so far, in bytes."
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def resident():
    """Resident size of this process now, in bytes; where there is no /proc, the largest so far, which makes a growth
    from it a lower bound."""
    status = Path('/proc/self/statm')
    return int(status.read_text().split()[1]) * resource.getpagesize() if status.exists() else peak()


def index_bytes(bm25):
    """Bytes of the index in memory without the passages: scores, their rows and starts, and the vocabulary about as it
    is."""
    arrays = sum(a.nbytes for a in (bm25.data, bm25.rows, bm25.start))
    return arrays, sum(len(w) + 49 + 104 for w in bm25.index.vocab_dict)   # a str and its place in a dict


def stream(passages, length, vocabulary, rng, at_once=10_000):
    "The passages of `corpus`, `at_once` of them in memory."
    for first in range(0, passages, at_once):
        for p in corpus(min(at_once, passages - first), length, vocabulary, rng):
            yield Passage(str(first + int(p.id)), f'title{first + int(p.id)}', p.text)


def shards(a):
    "Index a.passages passages as they come: what that takes, and what 21 million would."
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / 'index'
        list(stream(1000, a.length, a.vocabulary, np.random.default_rng(0)))
        start = time.perf_counter()
        for _ in stream(a.passages, a.length, a.vocabulary, np.random.default_rng(0)): pass
        making, before = time.perf_counter() - start, peak()
        start = time.perf_counter()
        build_index(stream(a.passages, a.length, a.vocabulary, np.random.default_rng(0)), index)
        seconds_of_it, growth = time.perf_counter() - start - making, peak() - before
        sizes = {f.name: f.stat().st_size for f in index.iterdir()}
        gc.collect()
        held, start = resident(), time.perf_counter()
        bm25 = BM25.load(index)
        loading, rng = time.perf_counter() - start, np.random.default_rng(1)
        texts = [bm25.passages[int(i)].text.split() for i in rng.integers(0, a.passages, a.queries)]
        queries = [' '.join(rng.choice(t, a.words)) for t in texts]
        bm25.search(queries, a.k)
        per_query = seconds(lambda: bm25.search(queries, a.k)) / len(queries)
        gib = {'peak of building': growth, 'on disk': sum(sizes.values()), 'held when searched': resident() - held}
        scale = 21e6 / a.passages
        print(json.dumps({
            'passages': a.passages, 'words_per_passage': a.length, 'vocabulary': len(bm25.index.vocab_dict),
            'build_seconds': round(seconds_of_it), 'load_seconds': round(loading, 2),
            'ms_per_query': round(per_query * 1e3, 2), 'gib': {k: round(v / 2 ** 30, 2) for k, v in gib.items()},
            'mib_of_files': {k: round(v / 2 ** 20) for k, v in sizes.items()},
            'in proportion, 21 million': {
                'build_hours': round(seconds_of_it * scale / 3600, 2), 'ms_per_query': round(per_query * 1e3 * scale),
                'gib': {k: round(v * scale / 2 ** 30, 1) for k, v in gib.items()}}}, indent=1))


def ask(url, queries, k, delays):
    "One client, one query at a time; appends the seconds that each took."
    client = SearchClient(url, tries=1)
    for q in queries: delays.append(seconds(lambda: client.search([q], k)))


def clients(a):
    "Milliseconds of a query: of one client alone, and of a.clients at once."
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        passages = corpus(a.passages, a.length, a.vocabulary, rng)
        build_index(passages, Path(folder) / 'index')
        queries = questions(passages, a.queries, a.words, rng)
        del passages
        server = subprocess.Popen([sys.executable, '-m', 'credit_rl.search_service', str(Path(folder) / 'index'),
                                   '--port', '0', '--workers', str(a.workers)], stdout=subprocess.PIPE, text=True)
        try:
            url = re.search(r'http://\S+', server.stdout.readline())[0]
            SearchClient(url).search(queries[:1], a.k)
            out = {'passages': a.passages, 'workers': a.workers}
            for n in (1, a.clients):
                delays, start = [], time.perf_counter()
                threads = [threading.Thread(target=ask, args=(url, queries, a.k, delays)) for _ in range(n)]
                for t in threads: t.start()
                for t in threads: t.join()
                p50, p99 = np.percentile(delays, [50, 99]) * 1e3
                out[f'{n} at once'] = {'queries': len(delays), 'p50_ms': round(p50, 1), 'p99_ms': round(p99, 1),
                                       'queries_per_second': round(len(delays) / (time.perf_counter() - start))}
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
        print(json.dumps(out, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (('passages', 100_000), ('length', 100), ('vocabulary', 200_000), ('queries', 400),
                        ('slow-queries', 20), ('words', 8), ('k', 3)):
        parser.add_argument(f'--{name}', type=int, default=value)
    parser.add_argument('--shards', action='store_true')
    parser.add_argument('--clients', type=int, default=0)
    parser.add_argument('--workers', type=int, default=2)
    a = parser.parse_args()
    if a.shards: return shards(a)
    if a.clients: return clients(a)
    rng = np.random.default_rng(0)
    passages = corpus(a.passages, a.length, a.vocabulary, rng)
    queries = questions(passages, a.queries, a.words, rng)
    k1, b = 1.5, 0.75

    gc.collect()
    before, start = resident(), time.perf_counter()
    fast = BM25(passages, k1, b, variant='robertson', progress=False)
    fast_index, building = time.perf_counter() - start, peak() - before
    start = time.perf_counter()
    slow = RankBM25(passages, k1, b)
    slow_index = time.perf_counter() - start

    part = queries[:a.slow_queries]
    common = {w for w, i in fast.index.vocab_dict.items() if fast.start[i + 1] - fast.start[i] > len(passages) / 2}
    # a word in over half of the passages is weighed differently by rank_bm25
    equal = [q for q in part if not common & set(q.split())]
    assert equal and np.allclose((k1 + 1) * fast.scores(equal), slow.scores(equal), atol=1e-3), 'the two do not agree'
    per_slow = min(seconds(lambda: slow.search(part, a.k)) for _ in range(2)) / len(part)
    per_fast = min(seconds(lambda: fast.search(queries, a.k)) for _ in range(3)) / len(queries)
    arrays, vocabulary = index_bytes(fast)
    with tempfile.TemporaryDirectory() as folder:
        fast.save(Path(folder) / 'index')
        disk = sum(f.stat().st_size for f in (Path(folder) / 'index').iterdir())
        load = seconds(lambda: BM25.load(Path(folder) / 'index').search(queries[:1], a.k))
    million = 1e6 / a.passages / 2 ** 30
    print(
        json.dumps(
            {
                'passages': a.passages,
                'words_per_passage': a.length,
                'words_per_query': a.words,
                'rank_bm25_ms_per_query': round(per_slow * 1e3, 3),
                'bm25_ms_per_query': round(per_fast * 1e3, 3),
                'ratio': round(per_slow / per_fast, 1),
                'index_seconds': {'bm25': round(fast_index, 1), 'rank_bm25': round(slow_index, 1)},
                f'gib_per_million_passages (extrapolated from {a.passages:,})': {
                    'scores': round(arrays * million, 3),
                    'vocabulary (at most)': round(vocabulary * million, 3),
                    'on disk, passages included': round(disk * million, 3),
                    'peak of building': round(building * million, 3),
                },
                'load_and_first_search_seconds': round(load, 3),
            },
            indent=1,
        )
    )


if __name__ == '__main__':
    main()
