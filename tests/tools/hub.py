"""A stand-in for the hub that speaks enough of its HTTP to serve data sets and models to `datasets` and
`huggingface_hub`: file lists, and files in whole or in part.

It can fail on purpose: `cut` names files whose first transfer is broken off in the middle and then refused once.
"""
import hashlib
import http.server
import json
import re
import threading
import urllib.parse


class Hub(http.server.ThreadingHTTPServer):
    "Serves {repository: (commit, {name: bytes})} at `url`, be they data sets or models; a context manager."
    daemon_threads = True

    def __init__(self, repositories, cut=()):
        super().__init__(('127.0.0.1', 0), _Handler)
        # asked: (method, path, Range)
        self.repositories, self.cut, self.asked, self.tokens = repositories, {name: 0 for name in cut}, [], set()
        self.url = f'http://127.0.0.1:{self.server_address[1]}'
        threading.Thread(target=self.serve_forever, kwargs={'poll_interval': .02}, daemon=True).start()

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()

    def transfers(self, name):
        "The Range headers (None: the whole) with which a file was asked for."
        return [asked for method, path, asked in self.asked if method == 'GET' and path.endswith('/' + name)]


def _listing(files, folder):
    "What lies in a folder of a repository, as the hub lists it."
    start = folder + '/' if folder else ''
    rest = {name: name[len(start):] for name in files if name.startswith(start)}
    return [
        {'type': 'file', 'path': name, 'size': len(files[name]), 'oid': hashlib.sha1(files[name]).hexdigest()}
        for name, r in rest.items()
        if '/' not in r
    ] + [
        {'type': 'directory', 'path': start + d, 'size': 0, 'oid': '0'}
        for d in sorted({r.split('/')[0] for r in rest.values() if '/' in r})
    ]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args): pass

    def reply(self, status, body, **headers):
        self.send_response(status)
        for name, value in {'Content_Length': str(len(body)), **headers}.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        if self.command == 'GET': self.wfile.write(body)

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        self.server.asked.append((self.command, path, self.headers.get('Range')))
        self.server.tokens.add(self.headers.get('Authorization'))
        found = re.fullmatch(
            r'(/api)?(?:/datasets|/models)?/([^/]+/[^/]+)/(revision|tree|resolve)/([0-9a-f]{40}|main)/?(.*)', path)
        commit, files = self.server.repositories.get(found[2], (None, {})) if found else (None, {})
        if commit is None or found[4] not in (commit, 'main'):
            return self.reply(404, b'{}', X_Error_Code='RevisionNotFound')
        if found[3] == 'revision':
            return self.reply(
                200,
                json.dumps({'id': found[2], 'sha': commit, 'siblings': [{'rfilename': n} for n in files]}).encode())
        if found[3] == 'tree': return self.reply(200, json.dumps(_listing(files, found[5])).encode())
        if found[5] not in files: return self.reply(404, b'{}', X_Error_Code='EntryNotFound')
        self.send_file(found[5], files[found[5]], commit)

    do_HEAD = do_GET

    def send_file(self, name, data, commit):
        about = dict(ETag=f'"{hashlib.sha256(data).hexdigest()}"', X_Repo_Commit=commit, Accept_Ranges='bytes')
        if self.command == 'GET' and name in self.server.cut:
            self.server.cut[name] += 1
            if self.server.cut[name] == 2: return self.reply(500, b'')
            if self.server.cut[name] == 1:
                self.reply(200, data[:len(data) // 2], **about, Content_Length=str(len(data)))
                self.close_connection = True
                return
        start = re.fullmatch(r'bytes=(\d+)-', self.headers.get('Range', ''))
        if not start: return self.reply(200, data, **about)
        at = int(start[1])
        self.reply(206, data[at:], **about, Content_Range=f'bytes {at}-{len(data) - 1}/{len(data)}')
