"""What holds for every server of rlmix: nobody on the network gets code into it.

That each asks for its key is tested beside it: `router/test_server.py`, `engine/test_keys.py`,
`loop/test_control.py`, `sandbox/test_server.py`, and for real SGLang `e2e/test_sglang.py`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmix.config.compose import load_config
from rlmix.core.errors import ConfigError
from rlmix.plan.engine_args import argument_faults

SRC = Path(__file__).parents[2] / "src" / "rlmix"
UNPICKLERS = ("pickle", "cloudpickle", "dill", "shelve", "joblib")
MAY_UNPICKLE = {
    # Between the driver and the actors of its own Ray, which asks for a token.
    "launch/ray.py",
    "launch/actor.py",
    # Between the ranks of one trainer or one emulated replica.
    "numerics/consistent/reduction.py",
}
SERVERS = (
    "engine/http.py", "engine/embedded/server.py", "engine/scripted/server.py", "loop/control.py",
    "router/server.py", "router/admin.py", "sandbox/server.py", "sandbox/wire.py",
)  # fmt: skip


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SRC.rglob("*.py")):
        yield path.relative_to(SRC).as_posix(), ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {part for name in names for part in name.split(".")}


def test_only_what_never_hears_the_network_unpickles() -> None:
    found = {name for name, tree in sources() if imported(tree) & set(UNPICKLERS)}
    assert found == MAY_UNPICKLE
    assert not found & set(SERVERS)


def test_no_server_evaluates_what_arrives() -> None:
    for name, tree in sources():
        if name not in SERVERS:
            continue
        called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not called & {"eval", "exec", "compile"}, name
        assert "marshal" not in imported(tree), name


def test_every_server_is_known_to_this_file() -> None:
    """Whoever adds one reads the rules, and says here which keys it asks for."""
    listening = re.compile(r"TCPSite\(|SockSite\(|web\.Server\(|asyncio\.start_server\(|uvicorn\.")
    # The wiring of the router listed above; modelled fleets for benchmarks, on loopback.
    others = {"router/__main__.py", "engine/timed/http1.py", "engine/timed/fleet.py"}
    found = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        if listening.search(path.read_text())
    }
    assert found - others <= set(SERVERS)
    assert {"engine/http.py", "loop/control.py", "router/__main__.py", "sandbox/server.py"} <= found


def test_code_of_a_checkpoint_is_never_trusted_and_no_array_is_unpickled() -> None:
    for name, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            for keyword in node.keywords:
                if keyword.arg in ("trust_remote_code", "allow_pickle"):
                    assert getattr(keyword.value, "value", True) is False, (name, node.lineno)
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "torch.load":
                safe = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                assert safe.get("weights_only") is True, (name, node.lineno)


@pytest.mark.parametrize("experiment", ["tiny", "qwen36_mixed", "exact"])
def test_servers_listen_on_loopback_unless_told_otherwise(experiment: str) -> None:
    config = load_config("train", [f"experiment={experiment}"]).config
    assert config.net.bind == "127.0.0.1"


@pytest.mark.parametrize(
    "argument",
    [
        "trust-remote-code=true", "trust-request-chat-template=true", "custom-weight-loader=[a.b]",
        "forward-hooks=hooks", "enable-custom-logit-processor=true", "load-format=pt",
    ],
)  # fmt: skip
def test_no_argument_of_a_server_brings_code_or_pickled_weights(argument: str) -> None:
    config = load_config(
        "train", ["experiment=tiny_sglang", f"+pools.sglang.engine_args.{argument}"]
    ).config
    (fault,) = argument_faults("sglang", config.pools["sglang"], is_moe=False)
    assert fault.startswith(f"pools.sglang.engine_args.{argument.partition('=')[0]}: ")
    assert fault.endswith("; leave it out")


@pytest.mark.parametrize("key", ["weights.store", "tasks.path"])
def test_an_address_with_a_password_is_refused(key: str) -> None:
    """It would stand in argv, config.yaml and the plan."""
    with pytest.raises(ConfigError, match="credentials come in the environment"):
        load_config("train", [f"{key}=s3://KEY:canary-1234@bucket/x"])
    kept = load_config("train", ["weights.store=abfs://box@account.dfs.core.windows.net/x"]).config
    assert kept.weights.store == "abfs://box@account.dfs.core.windows.net/x"
