"""A server with the routes of vLLM's that a trainer uses, behind which `HFEngine` writes; it dies when told to."""
import http.server
import json
import threading
from pathlib import Path
from urllib.parse import urlparse

from safetensors.torch import load_file

from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.models import load_model


class FakeServer:
    """On a free port. `asked`: (path, body) of every request. It dies, as a killed process, with its request `dies`;
    `most`: tokens that it writes at once; `stuck`: takes no new version; `root`: what it says it serves."""

    def __init__(self, folder, most=999, dies=None, stuck=False, root=None):
        model, tokenizer = load_model(str(folder))
        self.engine, self.root, self.most = HFEngine(model.cpu(), tokenizer, max_length=192), root or str(folder), most
        self.asked, self.version, self.stuck, self.dies, self.lock = [], 'default', stuck, dies, threading.Lock()
        self.goes, self.generated, fake = threading.Event(), 0, self
        self.goes.set()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'
            def do_GET(self): self.answer(None)
            def do_POST(self): self.answer(json.loads(self.rfile.read(int(self.headers['Content-Length'] or 0)) or '{}'))
            def log_message(self, *args): pass

            def answer(self, body):
                path = urlparse(self.path).path[1:]
                fake.asked.append((self.path[1:], body))
                route = getattr(fake, path.replace('/', '_'), None)
                said = route(body) if route and not fake.is_dead else None if fake.is_dead else {}
                if fake.is_dead:                              # a request that was under way is not answered either
                    self.close_connection = True
                    return
                raw = json.dumps(said).encode()
                self.send_response(200)
                self.send_header('Content-Length', str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 128

        self.server = Server(('127.0.0.1', 0), Handler)
        self.server.daemon_threads = True
        self.url = f'http://127.0.0.1:{self.server.server_port}'
        threading.Thread(target=self.server.serve_forever, kwargs={'poll_interval': .02}, daemon=True).start()

    is_dead = property(lambda self: self.dies is not None and self.generated >= self.dies)

    def v1_models(self, body): return {'data': [{'id': 'x', 'root': self.root, 'max_model_len': self.engine.max_length}]}

    def inference_v1_generate(self, body):
        self.goes.wait()
        how, self.generated = body['sampling_params'], self.generated + 1
        greedy = how['temperature'] == 0
        sampling = SamplingParams(1. if greedy else how['temperature'], how.get('top_p', 1.), how.get('top_k', 0), greedy,
                                  min(self.most, how['max_tokens']), how.get('stop', ()))
        with self.lock: out = self.engine.generate([body['token_ids']], sampling, seeds=[how['seed']])
        ids = out.ids[0]
        end = next((i for i, token in enumerate(ids, 1) if token in how['stop_token_ids']), len(ids))
        logps = [{'token_id': token, 'logprob': logp} for token, logp in zip(ids[:end], out.logps[0])]
        spans = [{'version': self.version, 'start': 0, 'end': end}]
        return {'choices': [{'token_ids': ids[:end], 'logprobs': {'content': logps}, 'weight_versions': spans}]}

    def pause(self, body): self.goes.clear()
    def resume(self, body): self.goes.set()
    def reset_prefix_cache(self, body): return {'success': True}
    def weight_info(self, body): return {'weight_version': self.version}
    def get_world_size(self, body): return {'world_size': 1}

    def update_weight_version(self, body):
        if not self.stuck: self.version = body['new_version']

    def collective_rpc(self, body):
        assert body['method'] == 'reload_weights' and not self.goes.is_set()
        named = load_file(Path(body['kwargs']['weights_path']) / 'model.safetensors')
        assert 'lm_head.weight' in named
        self.engine.load(named)

    def close(self):
        self.goes.set()
        self.server.shutdown()
        self.server.server_close()
