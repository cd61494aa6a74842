"""What an index of BM25 takes at a size, and what a served one bears; how it compares with others, bench_peers says.

    python tests/bench/bench_retrieval.py --passages 1000000
    python tests/bench/bench_retrieval.py --clients 100 [--workers 2]

Passages are synthetic: words drawn by Zipf's law, as many as a block of Wikipedia has. They are made one at a time and
indexed by build_index: no list of passages is held, and what is measured at that many passages is printed, with what 21
million of them would take in proportion. With --clients the index is served by `credit-rl serve`, and so many clients
ask at once, each after one client alone.
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
from credit_rl.retrieval import BM25, build_index
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
    for name, value in (('passages', 100_000), ('length', 100), ('vocabulary', 200_000), ('queries', 400), ('words', 8),
                        ('k', 3), ('clients', 0), ('workers', 2)):
        parser.add_argument(f'--{name}', type=int, default=value)
    a = parser.parse_args()
    (clients if a.clients else shards)(a)


if __name__ == '__main__':
    main()
