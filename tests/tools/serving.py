"A small HTTP server on this machine, in threads: what it answers is a function's word."
import http.server
import json
import threading


class Serving(http.server.ThreadingHTTPServer):
    """At `url`, as a context manager. `answer`: function of a request's path, JSON (None: it brings none) and headers →
    status, body (bytes, text or JSON) and perhaps headers of its own, or None: it hangs up. `asked` keeps all three."""
    daemon_threads, request_queue_size = True, 128   # five may wait by default; one beyond is tried again a second later

    def __init__(self, answer, port=0):
        self.answer, self.asked = answer, []
        super().__init__(('127.0.0.1', port), _Handler)
        self.url = f'http://127.0.0.1:{self.server_port}'
        threading.Thread(target=self.serve_forever, kwargs={'poll_interval': .02}, daemon=True).start()

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass

    def do_POST(self):
        length = int(self.headers['Content-Length'] or 0)
        self.server.asked.append((self.path, json.loads(self.rfile.read(length)) if length else None, self.headers))
        said = self.server.answer(*self.server.asked[-1])
        if said is None: return
        status, body, *more = said
        if not isinstance(body, (bytes, str)): body = json.dumps(body)
        body = body if isinstance(body, bytes) else body.encode()
        self.send_response(status)
        for name, value in {'Content-Length': str(len(body)), **dict(*more)}.items(): self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST
