"""Headless Chromium over its debugging pipe: opens pages, records everything that goes wrong.

Needs nothing but the standard library and the program chromium-headless-shell or
chromium.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time

PROGRAMS = ("chromium-headless-shell", "chromium")
PATIENCE_SECONDS = 15
KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36,
             "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class BrowserError(Exception):
    pass


def pipe_above_9():
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high


class Browser:
    def __init__(self):
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if not program:
            raise BrowserError(f"none of {', '.join(PROGRAMS)} is installed: run scripts/setup.sh test")
        self.profile = tempfile.TemporaryDirectory(prefix="tessera-browser-", ignore_cleanup_errors=True)
        # The browser expects its pipe as descriptors 3 and 4, so ours must be others.
        commands, self.commands = pipe_above_9()
        self.answers, answers = pipe_above_9()
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers} {commands}<&- {answers}>&-', "bash", program,
             "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--disable-extensions", "--hide-scrollbars",
             f"--user-data-dir={self.profile.name}", "--remote-debugging-pipe", "about:blank"],
            pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(commands)
        os.close(answers)
        self.unread = b""
        self.last_id = 0
        self.listener = None  # takes events
        self.call("Browser.getVersion")

    def close(self):
        self.listener = None
        try:
            self.call("Browser.close")
            self.process.wait(timeout=PATIENCE_SECONDS)
        except (BrowserError, OSError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
        self.profile.cleanup()

    def call(self, method, session=None, **params):
        """The answer's result; events that come before it go to the listener."""
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive(method)
            if answer.get("id") != self.last_id:
                continue
            if "error" in answer:
                raise BrowserError(f"{method}: {answer['error']['message']}")
            return answer["result"]

    def receive(self, waiting_for):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"\0" not in self.unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.answers], [], [], left)[0]:
                raise BrowserError(f"no answer in {PATIENCE_SECONDS} s to {waiting_for}")
            chunk = os.read(self.answers, 1 << 20)
            if not chunk:
                raise BrowserError(f"the browser ended, waiting for {waiting_for}")
            self.unread += chunk
        text, self.unread = self.unread.split(b"\0", 1)
        message = json.loads(text)
        if "method" in message and self.listener:
            self.listener(message)
        return message


class Page:
    """One page, in a tab of its own. `complaints` has what it did wrong: errors on the
    console, exceptions, requests for anything but itself."""

    def __init__(self, browser, path, width=1280, height=900, dark=False, touch=False):
        self.browser = browser
        self.url = path.absolute().as_uri()
        self.complaints = []
        self.is_loaded = False
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.target = target
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        browser.listener = self.take_event
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        failed = self.call("Page.navigate", url=self.url).get("errorText")
        if failed:
            raise BrowserError(f"{self.url}: {failed}")
        while not self.is_loaded:
            browser.receive(f"the load event of {self.url}")
        self.settle()

    def close(self):
        self.browser.call("Target.closeTarget", targetId=self.target)

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def take_event(self, event):
        method, params = event["method"], event.get("params", {})
        if event.get("sessionId") != self.session:
            return
        if method == "Page.loadEventFired":
            self.is_loaded = True
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            what = details.get("exception", {}).get("description", details["text"])
            self.complaints.append(f"exception: {what}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console {params['type']}: {[arg.get('value') for arg in params['args']]}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if url != self.url and not url.startswith("data:"):
                self.complaints.append(f"request: {url}")
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {params['message']}")
            self.browser.listener = None

    def settle(self):
        """Waits two frames, so that observers of sizes have drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise BrowserError(f"{expression}: {result['exceptionDetails']['exception']['description']}")
        return result["result"].get("value")

    def texts(self, selector):
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.textContent)")

    def text(self, selector):
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def move_mouse(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def press(self, *keys):
        for key in keys:
            code = KEY_CODES[key]
            text = {"Enter": "\r", " ": " "}.get(key)
            for kind in ("keyDown", "keyUp"):
                with_text = {"text": text} if text and kind == "keyDown" else {}
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code="Space" if key == " " else key,
                          windowsVirtualKeyCode=code, **with_text)
        self.settle()

    def screenshot(self, path):
        """A picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(image["data"]))
