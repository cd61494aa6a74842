"""A headless Chromium, driven through its debugging port, and a JupyterLab for it to look at."""
import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest

NAMES = ('chromium', 'chromium-browser', 'google-chrome')


def find_browser():
    "The program of a browser; a test without one is skipped."
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f'none of {", ".join(NAMES)} is installed: pages are not looked at')
    pytest.importorskip('websocket', reason='websocket-client, which comes with JupyterLab, is not installed')
    return found


class Tab:
    "One tab. `errors` are exceptions, console errors and refused requests, in words."
    def __init__(self, url, seconds, port):
        import websocket
        self.socket, self.number = websocket.create_connection(url, timeout=seconds), 0
        self.errors, self.seconds, self.port = [], seconds, port
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.call(f'{domain}.enable')

    def call(self, method, **params):
        "Send a command and wait for its result; what the browser says meanwhile is noted."
        self.number += 1
        self.socket.send(json.dumps({'id': self.number, 'method': method, 'params': params}))
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            said = json.loads(self.socket.recv())
            if said.get('id') == self.number:
                assert 'error' not in said, (method, said)
                return said['result']
            self.note(said)
        raise TimeoutError(f'{method} had no answer in {self.seconds} s')

    def note(self, said):
        method, p = said.get('method'), said.get('params', {})
        if method == 'Runtime.exceptionThrown':
            e = p['exceptionDetails']
            self.errors.append(e.get('exception', {}).get('description', e['text']))
        elif method == 'Runtime.consoleAPICalled' and p['type'] in ('error', 'assert'):
            self.errors.append(' '.join(str(a.get('value', a.get('description'))) for a in p['args']))
        elif method == 'Log.entryAdded' and p['entry']['level'] == 'error':
            self.errors.append(f"{p['entry']['text']} {p['entry'].get('url', '')}")

    def ask(self, expression):
        "Value of a JavaScript expression, a promise's when it is kept."
        found = self.call('Runtime.evaluate', expression=expression, returnByValue=True, awaitPromise=True)
        assert 'exceptionDetails' not in found, found
        return found['result'].get('value')

    def open(self, url, ready='document.readyState === "complete"'):
        "Go to a page and wait until an expression is true of it. Returns the seconds that took."
        since = time.monotonic()
        self.call('Page.navigate', url=url)
        self.wait(ready)
        return time.monotonic() - since

    def wait(self, expression):
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            with contextlib.suppress(AssertionError):            # the page is on its way
                if self.ask(f"Boolean({expression})"):
                    return
            time.sleep(.02)
        raise TimeoutError(f'not within {self.seconds} s: {expression}; errors: {self.errors}')

    def key(self, key):
        text = {'text': key} if len(key) == 1 else {}
        for kind in ('keyDown', 'keyUp'):
            self.call('Input.dispatchKeyEvent', type=kind, key=key, **(text if kind == 'keyDown' else {}))

    def size(self, width, height):
        self.call('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path):
        path.write_bytes(base64.b64decode(self.call('Page.captureScreenshot', format='png')['data']))
        return path


def targets(port, kind, seconds=0):
    "Addresses of a browser's pages, or frames ('iframe') of their own, as sandboxed ones are; asked for so long."
    end = time.monotonic() + seconds
    while True:
        with urllib.request.urlopen(f'http://127.0.0.1:{port}/json', timeout=60) as answer:
            found = [t['webSocketDebuggerUrl'] for t in json.load(answer) if t['type'] == kind]
        if found or time.monotonic() > end: return found
        time.sleep(.2)


@contextlib.contextmanager
def open_tab(folder, seconds=120):
    "A tab of a fresh browser whose profile lies in `folder`; both end with the block."
    program, profile = find_browser(), folder / 'profile'
    process = subprocess.Popen(
        [program, '--headless', '--no-sandbox', '--disable-gpu', '--disable-background-networking', '--disable-sync',
         '--no-first-run', '--disable-dev-shm-usage', '--remote-debugging-port=0', '--remote-allow-origins=*',
         f'--user-data-dir={profile}', '--window-size=1600,1000', 'about:blank'],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = wait_for_port(profile / 'DevToolsActivePort', process, seconds)
        tab = Tab(targets(port, 'page')[0], seconds, port)
        yield tab
        tab.socket.close()
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def wait_for_port(path, process, seconds):
    "The port that a browser writes down when it listens."
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if path.exists() and (lines := path.read_text().splitlines()):
            return int(lines[0])
        assert process.poll() is None, f'the browser ended with {process.returncode}'
        time.sleep(.05)
    raise TimeoutError(f'the browser did not listen within {seconds} s')


@contextlib.contextmanager
def open_lab(work, home, *words, **env):
    "A JupyterLab on loopback for the folder `work`, until the block ends: its address and its variables."
    env = {**os.environ, 'HOME': str(home),
           **{f'JUPYTER_{n}_DIR': str(home / n.lower()) for n in ('DATA', 'CONFIG', 'RUNTIME')}, **env}
    server = subprocess.Popen(
        [sys.executable, '-m', 'jupyter', 'lab', str(work), '--no-browser', '--allow-root', '--port=0',
         '--IdentityProvider.token=x', '--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate',
         '--LabApp.news_url=None', *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not (found := list((home / 'runtime').glob('jpserver-*.json'))):
            assert server.poll() is None and time.monotonic() < until, 'JupyterLab did not start'
            time.sleep(.1)
        yield json.loads(found[0].read_text())['url'], env
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(30)
