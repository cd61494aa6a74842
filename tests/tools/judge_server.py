"""A judge behind HTTP, on this machine: what it replies is a function's word."""
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from credit_rl.judge import Judge


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    "Where it is imported, requests to this machine go to it."
    monkeypatch.setenv('NO_PROXY', '*')


def counted(calls, **more):
    "What a judge has counted after so many calls."
    return dict(calls=calls, retries=0, failures=0, unparsable=0, empty=0, cut=0) | more


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128    # five may wait by default; a connection beyond is tried again a second later


class Stub:
    "Chat completions. `script`: function (prompt, attempt) -> reply, status, 'hang', or a body (dict, bytes)."

    def __init__(self, script, port=0):
        self.script, self.requests, self.lock, self.over = script, [], threading.Lock(), threading.Event()
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
                with stub.lock:
                    prompt = body['messages'][-1]['content']
                    attempt = sum(prompt == r['messages'][-1]['content'] for r in stub.requests)
                    stub.requests.append({**body, 'path': self.path, 'key': self.headers['Authorization']})
                todo = stub.script(prompt, attempt)
                if todo == 'hang':
                    stub.over.wait()
                    return
                status = todo if isinstance(todo, int) else 200
                message = {'role': 'assistant', 'content': todo if isinstance(todo, str) else None}
                data = {'id': 'x', 'object': 'chat.completion', 'created': 0, 'model': 'stub',
                        'choices': [{'index': 0, 'message': message, 'finish_reason': 'stop'}]}
                if isinstance(todo, int):
                    data = {'error': {'message': f'status {status} for {self.headers["Authorization"]}'}}
                if isinstance(todo, dict): data = todo
                raw = todo if isinstance(todo, bytes) else json.dumps(data).encode()
                self.send_response(status)
                self.send_header('Content-Type', 'text/html' if isinstance(todo, bytes) else 'application/json')
                self.send_header('Content-Length', str(len(raw)))
                self.send_header('retry-after-ms', '1')
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args): pass

        self.server = Server(('127.0.0.1', port), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def judge(self, **changes):
        setting = {'retries': 2, 'timeout': 600.0, 'concurrency': 4, **changes}
        return Judge(f'http://127.0.0.1:{self.server.server_port}/v1', 'stub', **setting)


def pleased(prompt, attempt):
    "What a judge may say, by what it is asked: of turns, of inventions, of the reference; every second time no."
    if 'ratings_by_pair' in prompt: return f'ratings_by_pair={[[2, 1, 0]] * prompt.count("</tool_response>")}'
    good, bad = ('grounded', 'invented') if 'invented' in prompt else ('Match', 'Mismatch')
    return f'Evaluation Rating: {good if len(prompt) % 2 else bad}'


if __name__ == '__main__':    # COMMAND …: with a judge behind it
    with Stub(pleased) as stub:
        judge = f'judge={{base_url: http://127.0.0.1:{stub.server.server_port}/v1, model: stub}}'
        sys.exit(subprocess.call([*sys.argv[1:], judge], env={**os.environ, 'NO_PROXY': '127.0.0.1'}))
