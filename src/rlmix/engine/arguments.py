"""Command line and identity that every engine server of ours has."""

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

import rlmix
from rlmix.core.numerics_key import NumericsKey

_PR_SET_PDEATHSIG = 1


def server_parser(*, prog: str, description: str) -> argparse.ArgumentParser:
    """Arguments of one replica. Values come from the plan; there are no hidden defaults for what
    decides numbers."""
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--model-path", required=True, help="view folder to serve")
    parser.add_argument("--accelerator", required=True, help="chip whose formats are reproduced")
    parser.add_argument("--weights", required=True, help="weight view: bf16, fp8 or nvfp4")
    parser.add_argument("--activations", default="bf16", help="format between the layers")
    parser.add_argument("--kv", required=True, help="key/value format: bf16 or fp8")
    parser.add_argument("--attention", required=True, help="attention backend that is reproduced")
    parser.add_argument("--moe", default="grouped", help="MoE runner, for the numerics key")
    parser.add_argument(
        "--consistency",
        choices=("native", "exact"),
        default="native",
        help="exact: the operators of the trainer, with its bits",
    )
    parser.add_argument("--tp-size", type=int, default=1, help="processes that split heads")
    parser.add_argument("--ep-size", type=int, default=1, help="processes that split experts")
    parser.add_argument("--max-running-requests", type=int, required=True)
    parser.add_argument("--context-length", type=int, help="default: the model's")
    parser.add_argument("--max-total-tokens", type=int, help="KV budget; default: all slots full")
    parser.add_argument("--sampling-mask-max-tokens", type=int, default=4096)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument("--ready-file", type=Path, help="written once the server can serve")
    parser.add_argument("--weight-version", default="0", help="version of --model-path")
    parser.add_argument("--pool", default="")
    parser.add_argument("--replica", default="")
    parser.add_argument("--seed", type=int, default=0, help="for requests without their own")
    parser.add_argument("--log-level", default="info")
    parser.add_argument(
        "--parent-pid", type=int, help="be killed by the system when this parent process ends"
    )
    return parser


def numerics_of(arguments: argparse.Namespace, *, engine: str) -> NumericsKey:
    """The label of what this server computes in; always marked as emulated."""
    return NumericsKey(
        accelerator=arguments.accelerator,
        weights=arguments.weights,
        activations=arguments.activations,
        kv=arguments.kv,
        attention=arguments.attention,
        moe=arguments.moe,
        tp=arguments.tp_size,
        consistency=arguments.consistency,
        engine=engine,
        engine_version=rlmix.__version__,
        is_emulated=True,
    )


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, whatever ends it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        print(f"parent {parent_pid} is gone already", file=sys.stderr)
        os._exit(1)
