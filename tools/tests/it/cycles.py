"""Makes, uses and ends sandboxes, and counts. Arguments: what, how many."""

import random
import sys
import threading
import time

from libdsec import Sandbox, SandboxException, UnavailableException

BASE = "base/mini:1"
RULES = {"allow": [{"to": "192.0.2.9", "port": 443}]}


def make(n: int, **more: object) -> Sandbox:
    disk = 16 if n % 3 == 0 else None
    network = RULES if n % 3 == 1 else None
    return Sandbox.create(BASE, memory_mb=64, disk_mb=disk, network=network, **more)


def cycles(count: int) -> None:
    """One after the other; a create may fail, nothing else may."""
    failed = 0
    for n in range(count):
        try:
            sb = make(n)
        except SandboxException:
            failed += 1
            continue
        if n % 4 == 0:
            assert sb.commands.run("echo x > /w/f; cat /w/f").stdout == "x\n"
        if n % 4 == 1:
            sb.commands.start("sleep 1000 & sleep 1000")
        if n % 8 == 2:
            sb.pause()
        sb.kill()
    print(count - failed, failed)


def burst(count: int) -> None:
    """All at once; none may be refused."""
    errors = []

    def one(n: int) -> None:
        try:
            make(2, request_id=f"burst-{n}").kill()
        except SandboxException as error:
            errors.append(f"{type(error).__name__}: {error}")

    began = time.monotonic()
    threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors[:10]:
        print(error, file=sys.stderr)
    print(count - len(errors), len(errors))
    print(f"{count} at once: {time.monotonic() - began:.1f} s", file=sys.stderr)


def storm(seconds: int) -> None:
    """Everything at once for a while, whatever the daemon does."""
    until = time.monotonic() + seconds

    def work(seed: int) -> None:
        rng, mine = random.Random(seed), []
        while time.monotonic() < until:
            try:
                kind = rng.randrange(5)
                if kind == 0 or not mine:
                    mine.append(make(rng.randrange(9)))
                elif kind == 1:
                    rng.choice(mine).commands.run("echo x >> /w/log")
                elif kind == 2:
                    mine.pop(rng.randrange(len(mine))).kill()
                elif kind == 3 and len(mine) < 6:
                    mine += [k for k in rng.choice(mine).fork(2) if isinstance(k, Sandbox)]
                else:
                    rng.choice(mine).files.write("/w/f", b"x" * 10000)
            except UnavailableException:
                time.sleep(0.02)
            except SandboxException:
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


{"cycles": cycles, "burst": burst, "storm": storm}[sys.argv[1]](int(sys.argv[2]))
