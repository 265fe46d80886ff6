"""E2B's own client, unmodified, against sandboxd. E2B_API_URL and E2B_SANDBOX_URL say where; templates are layers.

Nobody here wrote the client: what it takes for right is the measure.
DSEC_E2B_KEYS says that the daemon has keys.
"""

import asyncio
import contextlib
import io
import os
import socket
import time
import unittest
import urllib.error
import urllib.parse
import urllib.request

from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)
from e2b.exceptions import TemplateException

TEMPLATE = "base/mini:1+workspace/app:1+toolkit/perl:1"
SECONDS = 20


def until(check, what):
    """Waits until check gives something."""
    end = time.monotonic() + SECONDS
    while True:
        found = check()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"waited in vain until {what}")
        time.sleep(0.01)


class WithSandbox(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.sb = Sandbox.create(TEMPLATE, timeout=120, envs={"FROM": "create"}, metadata={"who": "suite"})

    @classmethod
    def tearDownClass(cls):
        cls.sb.kill()


class Commands(WithSandbox):
    def test_run(self):
        r = self.sb.commands.run("echo out $FROM $E2B_SANDBOX; echo err >&2")
        self.assertEqual((r.stdout, r.stderr, r.exit_code, r.error), ("out create true\n", "err\n", 0, None))
        with self.assertRaises(CommandExitException) as e:
            self.sb.commands.run("echo before; exit 7")
        self.assertEqual((e.exception.exit_code, e.exception.stdout), (7, "before\n"))

    def test_envs_user_and_folder(self):
        r = self.sb.commands.run("echo $A; pwd; id -u", envs={"A": "é \"q\""}, cwd="/srv/app")
        self.assertEqual(r.stdout, "é \"q\"\n/srv/app\n0\n")
        r = self.sb.commands.run("pwd; id -u; echo $HOME", user="ann")
        self.assertEqual(r.stdout, "/home/ann\n1000\n/home/ann\n")
        with self.assertRaises(InvalidArgumentException):
            self.sb.commands.run("pwd", cwd="/no/such")
        with self.assertRaises(InvalidArgumentException):
            self.sb.commands.run("pwd", user="nobody-here")

    def test_streaming(self):
        out, err = [], []
        r = self.sb.commands.run(
            "for i in 1 2 3; do echo ä$i; echo e$i >&2; done", on_stdout=out.append, on_stderr=err.append
        )
        self.assertEqual(("".join(out), "".join(err)), ("ä1\nä2\nä3\n", "e1\ne2\ne3\n"))
        self.assertEqual(r.stdout, "".join(out))
        r = self.sb.commands.run("head -c 5000000 /dev/zero")
        self.assertEqual(len(r.stdout), 5000000)

    def test_background_stdin_and_end_of_input(self):
        h = self.sb.commands.run("cat; echo end", background=True, stdin=True)
        h.send_stdin("one\n")
        self.sb.commands.send_stdin(h.pid, b"two\n")
        h.close_stdin()
        self.assertEqual(h.wait().stdout, "one\ntwo\nend\n")

    def test_without_stdin_input_is_empty(self):
        self.assertEqual(self.sb.commands.run("cat; echo end").stdout, "end\n")

    def test_list_connect_and_kill(self):
        h = self.sb.commands.run("echo first; read x; echo got $x", background=True, stdin=True)
        found = [p for p in self.sb.commands.list() if p.pid == h.pid]
        self.assertEqual((found[0].cmd, found[0].args[:2]), ("/bin/bash", ["-l", "-c"]))
        self.assertEqual(next(iter(h)), ("first\n", None, None))
        h.disconnect()
        again = self.sb.commands.connect(h.pid)
        again.send_stdin("word\n")
        self.assertEqual(again.wait().stdout, "got word\n")
        with self.assertRaises(NotFoundException):
            self.sb.commands.connect(h.pid)
        h = self.sb.commands.run("sleep 1000 & sleep 1000", background=True)
        self.assertTrue(h.kill())
        with self.assertRaises(CommandExitException) as e:
            h.wait()
        self.assertEqual(e.exception.exit_code, -1)
        self.assertFalse(self.sb.commands.kill(h.pid))
        until(lambda: "sleep" not in self.sb.commands.run("cat /proc/[0-9]*/comm 2>/dev/null || true").stdout, "all are dead")

    def test_timeout_kills_all_that_was_started(self):
        with self.assertRaises(TimeoutException):
            self.sb.commands.run("sleep 999 & sleep 999", timeout=0.5)
        until(lambda: "sleep" not in self.sb.commands.run("cat /proc/[0-9]*/comm 2>/dev/null || true").stdout, "all are dead")

    def test_binary_output_comes_as_text_with_replacements(self):
        self.assertEqual(self.sb.commands.run(r"printf 'a\377b'").stdout, "a\ufffdb")


class Terminals(WithSandbox):
    def test_terminal(self):
        seen = []
        pty = self.sb.pty.create(PtySize(rows=30, cols=100), cwd="/srv/app", envs={"PS1": ""})
        self.sb.pty.send_stdin(pty.pid, b"stty size; pwd; exit 3\n")
        with self.assertRaises(CommandExitException) as e:
            pty.wait(on_pty=seen.append)
        self.assertEqual(e.exception.exit_code, 3)
        text = b"".join(seen)
        self.assertIn(b"30 100\r\n", text)
        self.assertIn(b"/srv/app\r\n", text)

    def test_resize_connect_and_kill(self):
        pty = self.sb.pty.create(PtySize(rows=30, cols=100))
        self.sb.pty.resize(pty.pid, PtySize(rows=11, cols=22))
        pty.disconnect()
        again = self.sb.pty.connect(pty.pid)
        self.sb.pty.send_stdin(pty.pid, b"stty size\nexit\n")
        seen = []
        again.wait(on_pty=seen.append)
        self.assertIn(b"11 22\r\n", b"".join(seen))
        pty = self.sb.pty.create(PtySize(rows=30, cols=100))
        self.assertTrue(self.sb.pty.kill(pty.pid))
        until(lambda: not self.sb.pty.kill(pty.pid), "it has ended")


class Files(WithSandbox):
    def test_write_and_read(self):
        data = bytes(range(256)) * 5000
        info = self.sb.files.write("/w/a b/ü.bin", data)
        self.assertEqual((info.path, info.name, info.type), ("/w/a b/ü.bin", "ü.bin", FileType.FILE))
        self.assertEqual(bytes(self.sb.files.read("/w/a b/ü.bin", format="bytes")), data)
        self.assertEqual(b"".join(self.sb.files.read("/w/a b/ü.bin", format="stream")), data)
        self.sb.files.write("/w/t", "text")
        self.assertEqual(self.sb.files.read("/w/t"), "text")
        self.sb.files.write("/w/empty", b"")
        self.assertEqual(bytes(self.sb.files.read("/w/empty", format="bytes")), b"")
        info = self.sb.files.write("/w/streamed", io.BytesIO(data))
        self.assertEqual(bytes(self.sb.files.read("/w/streamed", format="bytes")), data)
        with self.assertRaises(FileNotFoundException):
            self.sb.files.read("/w/none")
        with self.assertRaises(InvalidArgumentException):
            self.sb.files.read("/w")

    def test_several_files_at_once(self):
        written = self.sb.files.write_files([{"path": f"/w/many/{n}", "data": f"file {n}"} for n in range(20)])
        self.assertEqual([w.path for w in written], [f"/w/many/{n}" for n in range(20)])
        self.assertEqual(self.sb.files.read("/w/many/13"), "file 13")

    def test_relative_paths_and_users(self):
        info = self.sb.files.write("mine", "x", user="ann")
        self.assertEqual(info.path, "/home/ann/mine")
        there = self.sb.files.get_info("/home/ann/mine")
        self.assertEqual((there.owner, there.group, there.permissions), ("ann", "ann", "-rw-r--r--"))
        with self.assertRaises((InvalidArgumentException, SandboxException)):
            self.sb.files.write("/root/theirs", "x", user="ann")
        self.assertFalse(self.sb.files.exists("/root/theirs"))

    def test_list_info_and_exists(self):
        self.sb.commands.run("mkdir -p /w/l/sub && echo 12345 > /w/l/f && chmod 640 /w/l/f && ln -s f /w/l/link")
        found = {e.name: e for e in self.sb.files.list("/w/l")}
        self.assertEqual({n: e.type for n, e in found.items()}, {"f": FileType.FILE, "link": FileType.SYMLINK, "sub": FileType.DIR})
        f = found["f"]
        self.assertEqual((f.size, f.mode, f.permissions, f.owner, f.path), (6, 0o640, "-rw-r-----", "root", "/w/l/f"))
        self.assertEqual(found["link"].symlink_target, "f")
        self.assertLess(abs(f.modified_time.timestamp() - time.time()), 3600)
        self.sb.files.write("/w/l/sub/deep", "")
        self.assertIn("/w/l/sub/deep", [e.path for e in self.sb.files.list("/w/l", depth=2)])
        self.assertTrue(self.sb.files.exists("/w/l/f"))
        self.assertFalse(self.sb.files.exists("/w/l/g"))
        with self.assertRaises(FileNotFoundException):
            self.sb.files.list("/w/none")

    def test_make_rename_and_remove(self):
        self.assertTrue(self.sb.files.make_dir("/w/d/e"))
        self.assertFalse(self.sb.files.make_dir("/w/d/e"))
        self.sb.files.write("/w/d/old", "1")
        self.assertEqual(self.sb.files.rename("/w/d/old", "/w/d/e/new").path, "/w/d/e/new")
        self.assertFalse(self.sb.files.exists("/w/d/old"))
        self.sb.files.remove("/w/d")
        self.assertFalse(self.sb.files.exists("/w/d"))
        with self.assertRaises(FileNotFoundException):
            self.sb.files.rename("/w/none", "/w/other")

    def test_watch(self):
        self.sb.files.make_dir("/w/watched/sub")
        handle = self.sb.files.watch_dir("/w/watched", recursive=True)
        self.sb.commands.run("cd /w/watched; echo 1 > a; echo 2 > sub/b; mv a c; rm sub/b; mkdir new; echo 3 > new/d")
        seen = []

        def all_there():
            seen.extend((e.name, e.type.value) for e in handle.get_new_events())
            want = {("a", "create"), ("a", "write"), ("a", "rename"), ("c", "create"), ("sub/b", "create"), ("sub/b", "remove"), ("new", "create"), ("new/d", "create")}
            return want <= set(seen)

        until(all_there, f"all is told: {seen}")
        handle.stop()
        with self.assertRaises(SandboxException):
            handle.get_new_events()
        with self.assertRaises(FileNotFoundException):
            self.sb.files.watch_dir("/w/none")

    def test_what_is_not_there_is_refused(self):
        with self.assertRaises(TemplateException):
            self.sb.files.write("/w/m", "x", metadata={"a": "b"})
        with self.assertRaises(TemplateException):
            self.sb.files.watch_dir("/w", include_entry=True)
        with self.assertRaises(InvalidArgumentException):
            self.sb.files.write("/w/gz", "x", gzip=True)


class Life(unittest.TestCase):
    def test_info_list_and_timeout(self):
        with Sandbox.create(TEMPLATE, timeout=100, metadata={"n": "a b/ü", "id": "one"}) as sb:
            info = sb.get_info()
            self.assertEqual((info.sandbox_id, info.template_id, info.state), (sb.sandbox_id, TEMPLATE, SandboxState.RUNNING))
            self.assertEqual((info.metadata["n"], info.cpu_count, info.memory_mb), ("a b/ü", 4, 4096))
            before = info.end_at
            sb.set_timeout(500)
            self.assertGreater((sb.get_info().end_at - before).total_seconds(), 300)
            sb.connect(timeout=10)
            self.assertGreater((sb.get_info().end_at - before).total_seconds(), 300, "connecting never shortens")
            query = SandboxQuery(metadata={"n": "a b/ü"})
            self.assertEqual([s.sandbox_id for s in Sandbox.list(query=query).next_items()], [sb.sandbox_id])
            self.assertEqual(Sandbox.list(query=SandboxQuery(metadata={"n": "z"})).next_items(), [])
            self.assertTrue(sb.is_running())
            self.assertEqual(Sandbox.connect(sb.sandbox_id).commands.run("echo same").stdout, "same\n")
        self.assertFalse(sb.is_running())
        self.assertFalse(sb.kill())
        with self.assertRaises(NotFoundException):
            sb.get_info()
        with self.assertRaises(TimeoutException):
            sb.commands.run("true")
        with self.assertRaises(NotFoundException):
            Sandbox.connect(sb.sandbox_id)

    def test_pages(self):
        with contextlib.ExitStack() as stack:
            made = [stack.enter_context(Sandbox.create(TEMPLATE, metadata={"pages": "yes"})).sandbox_id for _ in range(5)]
            query = SandboxQuery(metadata={"pages": "yes"})
            for order, expected in (("asc", made), ("desc", made[::-1])):
                pages, found = Sandbox.list(query=query, limit=2, order=order), []
                while pages.has_next:
                    page = [s.sandbox_id for s in pages.next_items()]
                    self.assertLessEqual(len(page), 2)
                    found += page
                self.assertEqual(found, expected)

    def test_pause_and_resume(self):
        with Sandbox.create(TEMPLATE) as sb:
            h = sb.commands.run("while :; do echo tick >> /w/ticks; sleep 0.01; done", background=True, timeout=0)
            until(lambda: sb.files.exists("/w/ticks"), "it runs")
            self.assertTrue(sb.pause())
            self.assertFalse(sb.pause())
            self.assertFalse(sb.is_running())
            paused = Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()
            self.assertIn(sb.sandbox_id, [s.sandbox_id for s in paused])
            same = sb.connect()
            self.assertTrue(same.is_running())
            size = same.files.get_info("/w/ticks").size
            until(lambda: same.files.get_info("/w/ticks").size > size, "it goes on")
            h.kill()
            with self.assertRaises(SandboxException):
                sb.pause(keep_memory=False)

    def test_fork(self):
        with Sandbox.create(TEMPLATE) as sb:
            sb.files.write("/w/of", "parent")
            children = sb.fork(count=3)
            try:
                for n, child in enumerate(children):
                    child.files.write("/w/own", str(n))
                self.assertEqual([c.files.read("/w/of") + c.files.read("/w/own") for c in children], ["parent0", "parent1", "parent2"])
                self.assertFalse(sb.files.exists("/w/own"))
            finally:
                for child in children:
                    child.kill()

    def test_snapshot(self):
        with Sandbox.create(TEMPLATE) as sb:
            sb.files.write("/w/kept", "in the snapshot")
            snapshot = sb.create_snapshot(name="step")
            with self.assertRaises(SandboxException):
                sb.create_snapshot(name="no/such name")
        with Sandbox.create(snapshot.snapshot_id) as again:
            self.assertEqual(again.files.read("/w/kept"), "in the snapshot")
        with self.assertRaises(SandboxException):
            Sandbox.delete_snapshot(snapshot.snapshot_id)

    def test_metrics(self):
        with Sandbox.create(TEMPLATE) as sb:
            sb.commands.run("while :; do :; done", background=True, timeout=0)
            [m] = until(lambda: [m for m in sb.get_metrics() if m.cpu_used_pct > 0], "it computes")
            self.assertEqual((m.cpu_count, m.mem_total), (4, 4096 << 20))
            self.assertGreater(m.mem_used, 0)

    def test_end_of_time(self):
        sb = Sandbox.create(TEMPLATE, timeout=1)
        until(lambda: not sb.is_running(), "its time is over")

    def test_ports(self):
        serve = (
            "perl -MIO::Socket::INET -e '$s=IO::Socket::INET->new(LocalAddr=>\"127.0.0.1\",LocalPort=>8000,Listen=>5,ReuseAddr=>1) or die;"
            " print \"up\\n\"; $|=1; while($c=$s->accept){$r=\"\";while(<$c>){$r.=$_;last if /^\\r?$/} print $c"
            " \"HTTP/1.1 200 OK\\r\\nContent-Length: \".length($r).\"\\r\\n\\r\\n$r\";close $c}'"
        )
        with Sandbox.create(TEMPLATE) as sb:
            host = sb.get_host(8000)
            self.assertTrue(host.startswith(f"8000-{sb.sandbox_id}.localhost:"), host)
            headers = {"Host": host}
            if sb.traffic_access_token:
                headers["e2b-traffic-access-token"] = sb.traffic_access_token

            def get(headers):
                request = urllib.request.Request(os.environ["E2B_SANDBOX_URL"] + "/a?b=c", headers=headers)
                try:
                    with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                        return reply.status, reply.read().decode()
                except urllib.error.HTTPError as error:
                    return error.code, error.read().decode()

            self.assertEqual(get(headers)[0], 502)
            h = sb.commands.run(serve, background=True, timeout=0)
            until(lambda: get(headers)[0] == 200, "it listens")
            status, said = get(headers | {"X-API-Key": os.environ["E2B_API_KEY"], "X-Mine": "1"})
            self.assertEqual((status, said.splitlines()[0]), (200, "GET /a?b=c HTTP/1.1"))
            self.assertIn("x-mine: 1", said.lower())
            self.assertNotIn("token", said.lower())
            if sb.traffic_access_token:
                self.assertNotIn(os.environ["E2B_API_KEY"], said)
                self.assertEqual(get({"Host": host})[0], 401)
            h.kill()

    def test_connections_that_change_their_protocol(self):
        serve = (
            "perl -MIO::Socket::INET -e '$s=IO::Socket::INET->new(LocalAddr=>\"127.0.0.1\",LocalPort=>8001,Listen=>5,ReuseAddr=>1) or die;"
            " $|=1; print \"up\\n\"; $c=$s->accept; $c->autoflush(1); while(<$c>){last if /^\\r?$/} print $c \"HTTP/1.1 101 Switching"
            " Protocols\\r\\nConnection: Upgrade\\r\\nUpgrade: echo\\r\\n\\r\\n\"; while(<$c>){print $c \"back $_\"}'"
        )
        with Sandbox.create(TEMPLATE) as sb:
            h = sb.commands.run(serve, background=True, timeout=0)
            self.assertEqual(next(iter(h)), ("up\n", None, None))
            where = urllib.parse.urlparse(os.environ["E2B_SANDBOX_URL"])
            with socket.create_connection((where.hostname, where.port), timeout=SECONDS) as connection:
                token = f"E2b-Traffic-Access-Token: {sb.traffic_access_token}\r\n" if sb.traffic_access_token else ""
                head = f"GET / HTTP/1.1\r\nHost: {sb.get_host(8001)}\r\n{token}Connection: Upgrade\r\nUpgrade: echo\r\n\r\n"
                connection.sendall(head.encode())
                stream = connection.makefile("rb")
                self.assertEqual(stream.readline(), b"HTTP/1.1 101 Switching Protocols\r\n")
                while stream.readline() != b"\r\n":
                    pass
                for n in range(3):
                    connection.sendall(b"%d\n" % n)
                    self.assertEqual(stream.readline(), b"back %d\n" % n)

    def test_what_is_not_there_is_refused(self):
        for wrong in (
            {"template": "base/none:1"},
            {"template": "mini"},
            {"volume_mounts": {"/v": "volume"}},
            {"lifecycle": {"on_timeout": "pause"}},
            {"network": {"egress_proxy": {"address": "proxy:1080"}}},
        ):
            with self.assertRaises(SandboxException, msg=str(wrong)):
                Sandbox.create(**({"template": TEMPLATE} | wrong))

    def test_wrong_key(self):
        if not os.environ.get("DSEC_E2B_KEYS"):
            self.skipTest("the daemon has no keys")
        with self.assertRaises(AuthenticationException):
            Sandbox.create(TEMPLATE, api_key="e2b_" + "0" * 40)
        with Sandbox.create(TEMPLATE) as sb:
            url = os.environ["E2B_SANDBOX_URL"]
            request = urllib.request.Request(f"{url}/files?path=/etc/passwd", headers={"E2b-Sandbox-Id": sb.sandbox_id})
            with self.assertRaises(urllib.error.HTTPError) as e:
                urllib.request.urlopen(request)
            self.assertEqual(e.exception.code, 401)
            # A signed address says who may, and the host's name which sandbox.
            path = sb.download_url("/etc/passwd", use_signature_expiration=60).removeprefix(url)
            signed = urllib.request.Request(url + path, headers={"Host": sb.get_host(49983)})
            with urllib.request.urlopen(signed) as reply:
                self.assertIn(b"root:x:0:0", reply.read())
            broken = urllib.request.Request(url + path.replace("passwd", "group"), headers={"Host": sb.get_host(49983)})
            with self.assertRaises(urllib.error.HTTPError) as e:
                urllib.request.urlopen(broken)
            self.assertEqual(e.exception.code, 401)


class Asynchronous(unittest.TestCase):
    def test_async(self):
        async def work():
            async with await AsyncSandbox.create(TEMPLATE) as sb:
                runs = [sb.commands.run(f"sleep 0.1; echo {n}") for n in range(16)]
                self.assertEqual([r.stdout for r in await asyncio.gather(*runs)], [f"{n}\n" for n in range(16)])
                await sb.files.write("/w/f", b"x")
                self.assertEqual(await sb.files.read("/w/f"), "x")
                events = []
                handle = await sb.files.watch_dir("/w", on_event=events.append)
                await sb.files.write("/w/new", "1")
                end = time.monotonic() + SECONDS
                while "new" not in [e.name for e in events]:
                    self.assertLess(time.monotonic(), end)
                    await asyncio.sleep(0.01)
                await handle.stop()
                seen = []
                pty = await sb.pty.create(PtySize(rows=20, cols=80), on_data=lambda data: seen.append(data))
                await sb.pty.send_stdin(pty.pid, b"echo typed; exit\n")
                await pty.wait()
                self.assertIn(b"typed\r\n", b"".join(seen))
                h = await sb.commands.run("read x; echo $x", background=True, stdin=True)
                await h.send_stdin("in\n")
                self.assertEqual((await h.wait()).stdout, "in\n")

        asyncio.run(work())


if __name__ == "__main__":
    unittest.main()
