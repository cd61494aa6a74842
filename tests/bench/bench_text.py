"""What do measures of a turn's text cost? 512 rollouts of 5 turns, each of which answers 4 searches with 6 kB apiece,
that show no gold, so that all of it is read: with the fields that a turn keeps, and read off its text as in a file from
before.

    python tests/bench/bench_text.py [--rollouts 512]
"""
import argparse
import json
import random
import time

from credit_rl.tspo import first_turns
from credit_rl.readers import Passage
from credit_rl.tools import SearchTool
from credit_rl.trajectory import Group, Question, Trajectory, Turn
from credit_rl.turn_rewards import rule_turn_rewards


def batch(rollouts, kept, rng):
    "Groups of eight rollouts; `kept`: turns keep what the tool returned."
    words = [''.join(rng.choices('abcdefghijklmnop', k=rng.randint(2, 9))) for _ in range(5000)]
    say = lambda count: ' '.join(rng.choices(words, k=count))

    class Search:
        def search(self, queries, k): return [[Passage('0', say(3), say(330)[:2000])] * k for _ in queries]

    def turn():
        queries = [say(5) for _ in range(4)]
        seen, result = SearchTool(Search(), 3, None).call([queries])[0]
        return Turn('tool', [1], [-1.], [2], '', str(seen), {'name': 'search', 'queries': queries}, result,
                    returned=seen.returned() if kept else ())
    groups = []
    for i in range(rollouts // 8):
        question = Question(str(i), 'who was it?', [f'{say(2)} zzqx', f'the {say(1)} qqq'])
        tries = [Trajectory(question, [0], [*(turn() for _ in range(5)), Turn('answer', [1], [-1.], [], '', '')],
                            'answer', 'x') for _ in range(8)]
        groups.append(Group(question, tries))
    return groups


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rollouts', type=int, default=512)
    a, found = parser.parse_args(), {}
    for kept in (True, False):
        groups = batch(a.rollouts, kept, random.Random(0))
        found['characters'] = len(groups[0].trajectories[0].turns[0].observation_text)
        for measure in (first_turns, rule_turn_rewards):
            since = time.process_time()
            measure(groups)
            found[f'{measure.__name__}, {"fields" if kept else "text"}'] = round(time.process_time() - since, 2)
    print(json.dumps(found))


if __name__ == '__main__': main()
