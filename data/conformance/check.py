"""Check an implementation of turn-level credit against the vectors beside this file. Needs Python 3.9 and nothing else.

    python check.py vectors_v1.json mine:advantages

`advantages(case, inputs)` in mine.py returns a list of R lists of T numbers, or None for a rule that it does not have.
Missing measurements are None. Exit code 1: something differs.
"""
import hashlib
import importlib
import json
import math
import sys


def read(path):
    "The vectors of a file. Raises ValueError where it is not what was written."
    with open(path, encoding='utf-8') as f: data = json.load(f)
    body = json.dumps([data['inputs'], data['cases']], sort_keys=True, separators=(',', ':'))
    found = hashlib.sha256(body.encode()).hexdigest()
    if found != data['sha256']:
        raise ValueError(f'{path} was altered: its sha256 is {found[:12]}…, it says {data["sha256"][:12]}…')
    return data


def differences(wanted, got, tolerance):
    "Where two tables of numbers differ: list of str."
    if [len(row) for row in got] != [len(row) for row in wanted]:
        return [f'rows of {[len(row) for row in got]} numbers, wanted {[len(row) for row in wanted]}']
    return [f'row {r}, token {t}: {b}, wanted {a}' for r, rows in enumerate(zip(wanted, got))
            for t, (a, b) in enumerate(zip(*rows))
            if not (math.isfinite(b) and abs(a - b) <= tolerance * max(1, abs(a)))]


def check(data, advantages):
    "What differs, by case: dict name -> list of str, [] where nothing does; cases that are not answered are left out."
    found = {}
    for case in data['cases']:
        got = advantages(case, data['inputs'][case['input']])
        if got is not None: found[case['name']] = differences(case['advantages'], got, data['tolerance'])
    return found


def main(path, place):
    module, _, name = place.partition(':')
    sys.path.insert(0, '.')
    data = read(path)
    found = check(data, getattr(importlib.import_module(module), name))
    for case, lines in found.items():
        print('differs' if lines else 'agrees ', case, *(f'\n    {line}' for line in lines[:3]))
    wrong = sum(map(bool, found.values()))
    print(f'{len(found)} of {len(data["cases"])} cases answered, {wrong} differ')
    return 1 if wrong or not found else 0


if __name__ == '__main__': sys.exit(main(*sys.argv[1:]))
