"""A headless Chromium, driven through its DevTools pipe with the standard library alone."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


class Browser:
    """One page. ``problems`` collects console errors, exceptions and refused requests."""

    def __init__(self, profile, *, seconds=60):
        self._seconds = seconds
        self._number = 0
        self._buffer = b""
        self.problems = []
        self.requests = []
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        # Chromium reads commands from descriptor 3 and answers on 4; the shell moves ours there.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = ["bash", "-c", script, "-", EXECUTABLE, *FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._out)  # which tells it to end
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def open(self, url, *, width=1280, height=900, dark=False):
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def check(self, url, *, width=1280, dark=False):
        """Opens a page: nothing is wrong with it, and nothing is cut off at the side."""
        self.open("about:blank")  # the page before this one may ask a server that has ended
        self.problems.clear()
        self.requests.clear()
        self.open(url, width=width, dark=dark)
        self.wait("document.querySelector('.card') !== null")
        assert self.evaluate("document.documentElement.scrollWidth") <= width
        wide = """[...document.querySelectorAll('main *')].filter(e => {
            const box = e.getBoundingClientRect();
            return box.width && (box.right > innerWidth + 1 || box.left < -1);
        }).map(e => e.outerHTML.slice(0, 200))"""
        assert self.evaluate(wide) == []
        assert self.problems == []

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression):
        deadline = time.monotonic() + self._seconds
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"waited {self._seconds} s for {expression}"
            time.sleep(0.02)

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path, *, whole=True):
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method, **parameters):
        return self._call(method, session=self._session, **parameters)

    def _call(self, method, *, session=None, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _note(self, event):
        method, told = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(told["exceptionDetails"])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(told["entry"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.problems.append(told["args"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def _receive(self):
        deadline = time.monotonic() + self._seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, f"{EXECUTABLE} did not answer within {self._seconds} s"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
