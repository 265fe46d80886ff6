"""A trainer that can be killed at any time: it keeps nothing, names its requests, and begins again. Arguments: the
sandbox, and how many steps."""

import sys
import time

from libdsec import Sandbox, SandboxException, UnavailableException, UnknownOutcomeException

STEPS = int(sys.argv[2])


def connected() -> Sandbox:
    while True:
        try:
            return Sandbox.connect(sys.argv[1])
        except UnavailableException:
            time.sleep(0.02)


sb = connected()


def step(n: int) -> str:
    name = f"step-{n}"
    append = f"echo {n} >> /w/log; sleep 0.0{n % 10}; wc -l < /w/log"
    if n % 5 == 1:
        return str(sb.files.write(f"/w/new{n}", b"x" * n, request_id=name))
    if n % 5 == 2:
        # Twice would fail: the old name is gone.
        sb.files.rename(f"/w/new{n - 1}", f"/w/old{n - 1}", request_id=name)
        return "renamed"
    if n % 5 == 3:
        return sb.commands.run(append, request_id=name, on_stdout=lambda _: None).stdout.strip()
    if n % 20 == 4:
        kids = sb.fork(1, request_id=name)
        return str([getattr(kid, "id", str(kid)) for kid in kids])
    return sb.commands.run(append, request_id=name).stdout.strip()


for n in range(STEPS):
    while True:
        try:
            print(n, "ok", step(n), flush=True)
        except UnknownOutcomeException:
            print(n, "unknown", flush=True)
        except UnavailableException:
            time.sleep(0.02)
            continue
        except SandboxException as error:
            print(n, "failed", type(error).__name__, error, flush=True)
        break
