"""libdsec against a real daemon: DSEC_URL says where; the layer base/mini:1 must have a shell and coreutils."""

import asyncio
import os
import tarfile
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

import libdsec
from libdsec import AsyncSandbox, DSecClient, DSecContainerRunArgs, Sandbox

BASE = "base/mini:1"


class LibdsecTests(unittest.TestCase):
    def setUp(self) -> None:
        self.sb = Sandbox.create(base=BASE, timeout=120, memory_mb=256, envs={"A": "b"})
        self.addCleanup(self.sb.kill)

    def test_results_say_what_happened(self) -> None:
        r = self.sb.commands.run("echo out $A; echo err >&2")
        self.assertEqual((r.stdout, r.stderr, r.exit_code, r.outcome), ("out b\n", "err\n", 0, "user_exit"))
        self.assertFalse(r.timed_out or r.oom or r.truncated)
        with self.assertRaises(libdsec.CommandExitException) as raised:
            self.sb.commands.run("echo why >&2; exit 3")
        self.assertEqual((raised.exception.exit_code, raised.exception.stderr), (3, "why\n"))
        r = self.sb.commands.run("exit 3", check=False)
        self.assertEqual(r.exit_code, 3)
        with self.assertRaises(libdsec.TimeoutException) as late:
            self.sb.commands.run("echo early; sleep 100", timeout=0.3)
        self.assertEqual((late.exception.result.stdout, late.exception.result.timed_out), ("early\n", True))
        r = self.sb.commands.run(["printf", r"\377\000x"])
        self.assertEqual(r.stdout_bytes, b"\xff\x00x")
        r = self.sb.commands.run("head -c 3000000 /dev/zero", check=True)
        self.assertTrue(r.truncated)
        self.assertEqual(len(r.stdout_bytes), 512 << 10)

    def test_streams_and_input(self) -> None:
        pieces: "list[str]" = []
        r = self.sb.commands.run("for i in 1 2 3; do echo ä$i; done", on_stdout=pieces.append)
        self.assertEqual("".join(pieces), r.stdout)
        self.assertEqual(r.stdout, "ä1\nä2\nä3\n")
        data = os.urandom(1_000_000)
        r = self.sb.commands.run("cat", stdin=data, on_stdout=lambda _: None)
        self.assertTrue(r.stdout_bytes == data)
        self.assertFalse(r.truncated)

    def test_background_commands(self) -> None:
        handle = self.sb.commands.start("read x; echo got $x; exit 4", stdin=True)
        again = Sandbox.connect(self.sb.id).commands.connect(handle.exec_id)
        self.assertEqual(again.pid, handle.pid)
        again.send_stdin("word\n")
        r = handle.wait(check=False)
        self.assertEqual((r.stdout, r.exit_code), ("got word\n", 4))
        handle = self.sb.commands.start("sleep 1000 & sleep 1000")
        handle.kill()
        self.assertEqual(handle.wait(check=False).signal, 9)
        handle = self.sb.commands.start("stat -c %F /dev/stdin -L; read x; echo $x", pty=(80, 24))
        handle.send_stdin("typed\n")
        self.assertIn("character special file\r\n", handle.wait().stdout)

    def test_sessions_keep_folder_variables_and_jobs(self) -> None:
        with self.sb.commands.session() as session:
            session.run("cd /w; X=5; sleep 1000 & true")
            pieces: "list[str]" = []
            r = session.run("pwd; echo -n $X; echo e >&2; jobs | wc -l", on_stdout=pieces.append)
            self.assertEqual((r.stdout, r.stderr), ("/w\n51\n", "e\n"))
            self.assertEqual("".join(pieces), r.stdout)
            self.assertEqual(session.run("cat; false", check=False).exit_code, 1)
            with self.assertRaises(libdsec.TimeoutException) as late:
                session.run("echo begun; sleep 1000", timeout=0.5)
            self.assertEqual(late.exception.result.stdout, "begun\n")
        sessions = [self.sb.commands.session() for _ in range(16)]
        for n, session in enumerate(sessions):
            session.run(f"N={n}")
        self.assertEqual([s.run("echo $N").stdout for s in sessions], [f"{n}\n" for n in range(16)])

    def test_the_same_request_runs_once(self) -> None:
        for _ in range(2):
            r = self.sb.commands.run("echo x >> /root/n; wc -l < /root/n", request_id="once")
            self.assertEqual(r.stdout.strip(), "1")
        one = Sandbox.create(base=BASE, request_id="same-" + self.sb.id)
        two = Sandbox.create(base=BASE, request_id="same-" + self.sb.id)
        self.assertEqual(one.id, two.id)
        for other in ({"memory_mb": 99}, {"toolkits": [BASE]}, {"envs": {"A": "b"}}):
            with self.assertRaises(libdsec.ConflictException):
                Sandbox.create(base=BASE, request_id="same-" + self.sb.id, **other)
        one.kill()

    def test_the_same_request_at_the_same_time_runs_once(self) -> None:
        def run(_: int) -> str:
            return self.sb.commands.run("sleep 0.2; echo x >> /w/par; wc -l < /w/par", request_id="par").stdout

        def streamed(_: int) -> str:
            echo = "sleep 0.2; echo y >> /w/par2; wc -l < /w/par2"
            return self.sb.commands.run(echo, request_id="par2", on_stdout=lambda _: None).stdout

        def fork(_: int) -> "list[str]":
            return [kid.id for kid in self.sb.fork(2, request_id="par3") if isinstance(kid, Sandbox)]

        def create(_: int) -> str:
            return Sandbox.create(base=BASE, request_id="par4-" + self.sb.id).id

        with ThreadPoolExecutor(8) as pool:
            self.assertEqual(set(pool.map(run, range(8))), {"1\n"})
            self.assertEqual(set(pool.map(streamed, range(8))), {"1\n"})
            kids = list(pool.map(fork, range(8)))
            made = set(pool.map(create, range(8)))
        self.assertEqual([kid for kid in kids if kid != kids[0]], [])
        self.assertEqual(len(set(kids[0])), 2)
        self.assertEqual(len(made), 1)
        for id in [*kids[0], *made]:
            Sandbox.connect(id).kill()
        asked = [e["request_id"] for e in self.sb.trajectory() if e["what"] == "request"]
        self.assertEqual(asked[1:], ["par", "par2", "par3"])

    def test_every_change_has_a_name_and_happens_once(self) -> None:
        files = self.sb.files
        files.write("/w/f", "one", request_id="w1")
        files.rename("/w/f", "/w/g", request_id="mv")
        # Again, from another process: nothing is written or renamed a second time.
        other = Sandbox.connect(self.sb.id)
        self.assertEqual(other.files.write("/w/f", "one", request_id="w1"), 3)
        other.files.rename("/w/f", "/w/g", request_id="mv")
        self.assertFalse(files.exists("/w/f"))
        with self.assertRaises(libdsec.ConflictException):
            files.write("/w/f", "two", request_id="w1")
        with self.assertRaises(libdsec.ConflictException):
            self.sb.commands.run("true", request_id="mv")
        kids = self.sb.fork(2, request_id="kids")
        again = other.fork(2, request_id="kids")
        self.assertEqual([getattr(k, "id") for k in kids], [getattr(k, "id") for k in again])
        for kid in kids:
            assert isinstance(kid, Sandbox)
            self.assertEqual(next(kid.trajectory())["body"], {"parent": self.sb.id, "from": None})
            kid.kill()
        for _ in range(2):
            run = self.sb.commands.run("echo out; exit 3", check=False, request_id="ex", on_stdout=lambda _: None)
            self.assertEqual((run.stdout, run.exit_code), ("out\n", 3))
        events = list(other.trajectory())
        self.assertEqual([e["seq"] for e in events], list(range(1, len(events) + 1)))
        asked = [e["request_id"] for e in events if e["what"] == "request"]
        self.assertEqual(asked[1:], ["w1", "mv", "kids", "ex"])
        results = {e["of"]: e for e in events if e["what"] == "result"}
        self.assertEqual(results[3]["upload"]["bytes"], 3)
        self.sb.kill(request_id="end")
        self.assertEqual(list(other.trajectory())[-2]["reason"], "it was killed")
        # What it did is told after its end, too.
        self.assertEqual(other.commands.run("echo out; exit 3", check=False, request_id="ex").stdout, "out\n")

    def test_files(self) -> None:
        files = self.sb.files
        data = os.urandom(700_001)
        self.assertEqual(files.write("/w/a b/ü.bin", data, mode=0o600), len(data))
        self.assertTrue(files.read("/w/a b/ü.bin", format="bytes") == data)
        files.write("/w/t", "text")
        self.assertEqual(files.read("/w/t"), "text")
        self.assertEqual([(e.name, e.kind) for e in files.list("/w")], [("a b", "directory"), ("t", "file")])
        self.assertEqual((files.get_info("/w/a b/ü.bin").mode, files.exists("/w/no")), (0o600, False))
        files.rename("/w/t", "/w/u")
        files.make_dir("/w/d/e")
        files.remove("/w/a b")
        self.assertEqual([e.path for e in files.list("/w", depth=2)], ["/w/d", "/w/d/e", "/w/u"])
        with self.assertRaises(libdsec.FileNotFoundException):
            files.read("/w/no")
        with tempfile.TemporaryDirectory() as local:
            os.makedirs(f"{local}/x/y")
            with open(f"{local}/x/y/z", "w") as file:
                file.write("deep")
            files.upload_tree(local, "/w/tree")
        self.assertEqual(files.read("/w/tree/x/y/z"), "deep")
        tar: tarfile.TarFile = files.download_tree("/w/tree")
        self.assertIn("x/y/z", [name.removeprefix("./") for name in tar.getnames()])

    def test_watching(self) -> None:
        self.sb.files.make_dir("/w/watched/sub")
        with self.sb.files.watch("/w/watched", recursive=True) as watch:
            seen = []
            # When a new folder is told, what happens in it is watched; before that, what goes at once is not seen.
            self.sb.commands.run("mkdir /w/watched/new")
            for event in watch:
                seen.append((event.change, event.name))
                break
            self.sb.commands.run("cd /w/watched; echo 1 > new/a; rm new/a; rm -r sub")
            for event in watch:
                seen.append((event.change, event.name))
                if event.name == "sub":
                    break
        for expected in [("create", "new"), ("create", "new/a"), ("remove", "new/a"), ("remove", "sub")]:
            self.assertIn(expected, seen)
        with self.sb.files.watch("/w/watched") as watch:
            self.assertIsNone(watch.get(timeout=0.05))
        with self.assertRaises(libdsec.FileNotFoundException):
            self.sb.files.watch("/w/none")
        watch = self.sb.files.watch("/w")
        self.sb.kill()
        with self.assertRaises(libdsec.SandboxException):
            list(watch)

    def test_life(self) -> None:
        self.assertTrue(self.sb.is_running())
        self.sb.pause()
        self.assertEqual(self.sb.get_info().state, "paused")
        self.assertEqual(self.sb.commands.run("echo on").stdout, "on\n")
        self.assertEqual(self.sb.get_info().state, "running")
        self.assertGreater(self.sb.get_metrics()["pids"], 0)
        short = Sandbox.create(base=BASE, timeout=0.5)
        until = time.monotonic() + 20
        while short.is_running():
            self.assertLess(time.monotonic(), until)
            time.sleep(0.05)
        self.assertEqual(short.get_info().reason, "its time was over")
        with self.assertRaises(libdsec.SandboxGoneException):
            short.commands.run("true")
        with self.assertRaises(libdsec.NotFoundException):
            Sandbox.connect("sb-nothing")
        with self.assertRaises(libdsec.NotFoundException):
            Sandbox.create(base="base/nothing:1")
        with self.assertRaises(libdsec.InvalidArgumentException):
            Sandbox.create(base=BASE, network={"allow": ["1.1.1.1:53/udp"]})

    def test_children_and_layers(self) -> None:
        self.sb.commands.run("mkdir -p /w/keep; echo parent > /w/keep/f; echo secret > /w/secret; rm /etc/passwd")
        kids = self.sb.fork(3)
        for n, kid in enumerate(kids):
            self.assertIsInstance(kid, Sandbox)
            assert isinstance(kid, Sandbox)
            kid.commands.run(f"echo child {n} >> /w/keep/f")
        self.assertEqual(self.sb.files.read("/w/keep/f"), "parent\n")
        for n, kid in enumerate(kids):
            assert isinstance(kid, Sandbox)
            self.assertEqual(kid.files.read("/w/keep/f"), f"parent\nchild {n}\n")
            self.assertFalse(kid.files.exists("/etc/passwd"))
            self.assertEqual(kid.get_info().parent, self.sb.id)
            kid.kill()
        name = f"workspace/step:{self.sb.id}"
        layer = self.sb.pack_diff(name, scrub=["/w/secret"])
        self.assertEqual(len(layer.digest), 64)
        with Sandbox.create(base=BASE, workspace=name) as again:
            self.assertEqual(again.files.read("/w/keep/f"), "parent\n")
            self.assertFalse(again.files.exists("/w/secret"))
            self.assertFalse(again.files.exists("/etc/passwd"))
            # Chains: a layer on a layer on a layer.
            again.files.write("/w/two", "2")
            second = again.pack_diff(name + "-2")
        with Sandbox.create(base=BASE, workspace=name, toolkits=[second.digest]) as last:
            self.assertEqual(last.files.read("/w/two"), "2")
            self.assertEqual(last.files.read("/w/keep/f"), "parent\n")

    def test_earlier_steps(self) -> None:
        write = self.sb.files.write
        write("/w/f", "1")
        first = self.sb.snapshot("first")
        self.assertIsNone(first.layer)
        write("/w/f", "2")
        layer = self.sb.pack_diff(f"workspace/steps:{self.sb.id}")
        write("/w/f", "3")
        self.assertEqual([(s.name, s.layer) for s in self.sb.steps()], [("first", None), (layer.name, layer.digest)])

        def kid(from_: "libdsec.Step | libdsec.Layer | str | None") -> Sandbox:
            child = self.sb.fork(from_=from_)[0]
            assert isinstance(child, Sandbox), child
            self.addCleanup(child.kill)
            return child

        kids = [kid(from_) for from_ in (None, "first", first, layer.name, layer)]
        self.assertEqual([k.files.read("/w/f") for k in kids], ["3", "1", "1", "2", "2"])
        # Steps are a sandbox's own; a child has its own from then on.
        self.assertEqual(kids[1].steps(), [])
        kids[1].snapshot("first")
        self.sb.forget_step("first")
        with self.assertRaises(libdsec.NotFoundException) as raised:
            self.sb.fork(from_="first")
        self.assertIn(layer.name, str(raised.exception))
        self.assertEqual(kids[1].files.read("/w/f"), "1")
        for name in ("", "a/b", "x" * 129, "new\nline"):
            with self.assertRaises(libdsec.InvalidArgumentException):
                self.sb.snapshot(name)

    def test_async(self) -> None:
        async def work() -> None:
            async with await AsyncSandbox.create(base=BASE, timeout=60) as sb:
                runs = [sb.commands.run(f"sleep 0.2; echo {n}") for n in range(16)]
                results = await asyncio.gather(*runs)
                self.assertEqual([r.stdout for r in results], [f"{n}\n" for n in range(16)])
                await sb.files.write("/w/f", b"x")
                self.assertEqual(await sb.files.read("/w/f"), "x")
                async with await sb.files.watch("/w") as watch:
                    await sb.files.write("/w/seen", "")
                    async for event in watch:
                        if (event.change, event.name) == ("create", "seen"):
                            break
                self.assertEqual(b"".join([piece async for piece in sb.files.stream("/w/f")]), b"x")
                async with await sb.commands.session() as session:
                    await session.run("X=1")
                    self.assertEqual((await session.run("echo $X")).stdout, "1\n")
                await sb.snapshot("now", request_id="snap")
                self.assertEqual([step.name for step in await sb.steps()], ["now"])
                (kid,) = await sb.fork(from_="now", request_id="kid")
                assert isinstance(kid, AsyncSandbox)
                self.assertEqual(await kid.changes(), await sb.changes())
                asked = [e.get("request_id") async for e in sb.trajectory() if e["what"] == "request"]
                self.assertEqual(asked[-2:], ["snap", "kid"])
                await kid.kill()
                handle = await sb.commands.start("echo bg")
                self.assertEqual((await handle.wait()).stdout, "bg\n")
            self.assertFalse((await AsyncSandbox.connect(sb.id)).id != sb.id)

        asyncio.run(work())

    def test_the_listing_of_the_paper(self) -> None:
        with DSecClient().open() as client:
            args = DSecContainerRunArgs(
                container_image="mini:1",
                memory_limit_mb=256,
                cpu_cores_limit=1,
                ttl_running_stop=60,
                network_rules={"npm": False, "pypi": True},
                init_user="root",
            )
            sandbox = client.run_container(args, timeout=120)
            self.assertEqual(sandbox.run_shell("echo $((6 * 7))").stdout, "42\n")
            sandbox.stop()
            created = next(sandbox.sandbox.trajectory())["body"]
            names = [rule["to"] for rule in created["network"]["allow"]]
            self.assertEqual(names, ["pypi.org", "files.pythonhosted.org"])
            with self.assertRaises(libdsec.InvalidArgumentException):
                client.run_container(DSecContainerRunArgs("mini:1", network_rules={"github": True}))


if __name__ == "__main__":
    unittest.main()
