"""An OpenAI-compatible endpoint that plays a judge strictly, for tests."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FIELDS = {"model": str, "messages": list, "temperature": (int, float), "max_tokens": int}
ROLES = ["system", "user", "assistant"]


class Refused(Exception):
    def __init__(self, status, message="no"):
        super().__init__(message)
        self.status = status


@contextmanager
def endpoint(answer, *, key=None):
    """Its address, and the requests that it took. ``answer`` turns a request into a text, or into
    bytes that are sent as they are, or raises ``Refused``."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                check(self, body, key)
                if body["max_tokens"] > 1:  # not the question before a run
                    requests.append(body)
                text = answer(body)
            except Refused as refused:
                self.send_error(refused.status, str(refused))
                return
            if not isinstance(text, bytes):
                choice = {"index": 0, "message": {"role": "assistant", "content": text}}
                text = json.dumps({"choices": [choice], "usage": {"total_tokens": 10}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *given):
            """A client that gave up is no error."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", requests
        finally:
            server.shutdown()
            thread.join()


def check(handler, body, key):
    if handler.path != "/v1/chat/completions":
        raise Refused(404)
    if key is not None and handler.headers["Authorization"] != f"Bearer {key}":
        raise Refused(401)
    if handler.headers["Content-Type"] != "application/json" or body.keys() != FIELDS.keys():
        raise Refused(400, "fields")
    if not all(isinstance(body[name], kind) for name, kind in FIELDS.items()):
        raise Refused(400, "kinds")
    messages = body["messages"]
    if not all(m.keys() == {"role", "content"} and m["role"] in ROLES for m in messages):
        raise Refused(400, "messages")


def told(request):
    """The lines of the user's message by name, each a JSON string."""
    lines = request["messages"][-1]["content"].split("\n")
    return {name: json.loads(text) for name, text in (line.split(": ", 1) for line in lines)}
