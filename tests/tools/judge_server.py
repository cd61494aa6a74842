"""A judge behind HTTP, on this machine: what it replies is a function's word."""
import os
import subprocess
import sys
import threading

import pytest

from credit_rl.judge import Judge
from serving import Serving


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    "Where it is imported, requests to this machine go to it."
    monkeypatch.setenv('NO_PROXY', '*')


def counted(calls, **more):
    "What a judge has counted after so many calls."
    return dict(calls=calls, retries=0, failures=0, unparsable=0, empty=0, cut=0) | more


class Stub:
    "Chat completions. `script`: function (prompt, attempt) -> reply, status, 'hang', or a body (dict, bytes)."

    def __init__(self, script, port=0):
        self.script, self.requests, self.lock, self.over = script, [], threading.Lock(), threading.Event()
        self.server = Serving(self.answer, port)

    def answer(self, path, body, headers):
        key = headers['Authorization']
        with self.lock:
            prompt = body['messages'][-1]['content']
            attempt = sum(prompt == r['messages'][-1]['content'] for r in self.requests)
            self.requests.append({**body, 'path': path, 'key': key})
        todo = self.script(prompt, attempt)
        if todo == 'hang': return self.over.wait() and None
        status, page = todo if isinstance(todo, int) else 200, isinstance(todo, bytes)
        message = {'role': 'assistant', 'content': todo if isinstance(todo, str) else None}
        data = {'id': 'x', 'object': 'chat.completion', 'created': 0, 'model': 'stub',
                'choices': [{'index': 0, 'message': message, 'finish_reason': 'stop'}]}
        if isinstance(todo, int): data = {'error': {'message': f'status {status} for {key}'}}
        if isinstance(todo, (dict, bytes)): data = todo
        return status, data, {'Content-Type': 'text/html' if page else 'application/json', 'retry-after-ms': '1'}

    def __enter__(self): return self

    def __exit__(self, *exc):
        self.over.set()
        self.server.__exit__()

    def judge(self, **changes):
        setting = {'retries': 2, 'timeout': 600.0, 'concurrency': 4, **changes}
        return Judge(f'{self.server.url}/v1', 'stub', **setting)


def pleased(prompt, attempt):
    "What a judge may say, by what it is asked: of turns, of inventions, of the reference; every second time no."
    if 'ratings_by_pair' in prompt: return f'ratings_by_pair={[[2, 1, 0]] * prompt.count("</tool_response>")}'
    good, bad = ('grounded', 'invented') if 'invented' in prompt else ('Match', 'Mismatch')
    return f'Evaluation Rating: {good if len(prompt) % 2 else bad}'


if __name__ == '__main__':    # COMMAND …: with a judge behind it
    with Stub(pleased) as stub:
        judge = f'judge={{base_url: http://127.0.0.1:{stub.server.server_port}/v1, model: stub}}'
        sys.exit(subprocess.call([*sys.argv[1:], judge], env={**os.environ, 'NO_PROXY': '127.0.0.1'}))
