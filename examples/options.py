"""The options of all examples, in one place."""

from __future__ import annotations

import argparse


def client_options(description: str) -> argparse.Namespace:
    """Of an example that talks to a running server: `url`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    return parser.parse_args()


def engine_options(description: str) -> argparse.Namespace:
    """Of an example that runs SGLang itself; named as the server's."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--impress-ssd-dir", help="default: a temporary directory")
    parser.add_argument("--impress-bits", type=float, default=5.0)
    return parser.parse_args()
