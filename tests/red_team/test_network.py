"""The network, and sockets that are not of the network."""

import contextlib
import os
import socket

from .conftest import Lab


def test_servers_of_the_host_are_not_reached(lab: Lab) -> None:
    path = str(lab.folder / "s")
    abstract = f"\0rlmix_red_{os.getpid()}"
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        named = stack.enter_context(socket.socket(socket.AF_UNIX))
        named.bind(path)
        named.listen()
        os.chmod(path, 0o777)
        hidden = stack.enter_context(socket.socket(socket.AF_UNIX))
        hidden.bind(abstract)
        hidden.listen()
        answers = lab.attempts(f"""
def connect(family, kind, address):
    with socket.socket(family, kind) as one:
        one.settimeout(3)
        one.connect(address)
        one.send(b"out")
I, U, S, D = socket.AF_INET, socket.AF_UNIX, socket.SOCK_STREAM, socket.SOCK_DGRAM
attempt("tcp", lambda: connect(I, S, ("127.0.0.1", {tcp.getsockname()[1]})))
attempt("outside", lambda: connect(I, S, ("192.0.2.1", 80)))
attempt("outside 6", lambda: connect(socket.AF_INET6, S, ("2001:db8::1", 80)))
attempt("metadata", lambda: connect(I, S, ("169.254.169.254", 80)))
attempt("udp outside", lambda: connect(I, D, ("192.0.2.1", 53)))
attempt("named socket", lambda: connect(U, S, {path!r}))
attempt("abstract socket", lambda: connect(U, S, {abstract!r}))
attempt("raw", lambda: socket.socket(I, socket.SOCK_RAW, 1).close())
attempt("hypervisor", lambda: connect(40, S, (2, 1024)))
""")
        assert len(answers) == 9
        no = {
            *("ECONNREFUSED", "ENETUNREACH", "ENOENT", "EACCES", "EPERM"),
            *("EAFNOSUPPORT", "EADDRNOTAVAIL"),
        }
        assert {name: answer for name, answer in answers.items() if answer not in no} == {}
        for server in (tcp, named, hidden):
            server.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                server.accept()
                raise AssertionError("somebody connected")
    os.unlink(path)


def test_a_server_of_one_sandbox_is_not_seen_by_another(lab: Lab) -> None:
    first, second = lab.create(), lab.create()
    listen = (
        'python3 -c \'import socket, time; s = socket.create_server(("127.0.0.1", 4711)); '
        'print("listening", flush=True); time.sleep(20)\' & sleep 1'
    )
    served = lab.do(first.run(listen, 20))
    tried = lab.do(second.run("(exec 3<>/dev/tcp/127.0.0.1/4711) 2>&1; echo tried $?", 20))
    if lab.name == "namespaces":
        assert served.output == "listening\n"
    assert tried.output.endswith("tried 1\n")
    lab.do(first.destroy())
    lab.do(second.destroy())


def test_names_of_the_hosts_interfaces_are_not_seen(lab: Lab) -> None:
    if lab.name == "weak":
        return  # It shares the network's description, and can open no socket to it.
    (result,) = lab.run("ls /sys; tail -n +3 /proc/net/dev | cut -d: -f1; hostname")
    assert result.output.split() == ["lo", "sandbox"]
