"""Finds model folders: a path, or `bundled:NAME` for what ships inside the package."""

from pathlib import Path

from rlmix.core.errors import ConfigError

BUNDLED_PREFIX = "bundled:"
BUNDLED = {"tiny": Path(__file__).parent / "warm_start"}
MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def resolve_model(path: str | Path) -> Path:
    """Folder of the model that `model.path` names.

    Raises:
        ConfigError: unknown bundled name, or a folder that lacks one of MODEL_FILES.
    """
    text = str(path)
    if text.startswith(BUNDLED_PREFIX):
        name = text.removeprefix(BUNDLED_PREFIX)
        if name not in BUNDLED:
            allowed = ", ".join(BUNDLED_PREFIX + known for known in sorted(BUNDLED))
            raise ConfigError(f"model.path={text!r}; bundled models: {allowed}")
        folder = BUNDLED[name]
    else:
        folder = Path(text).expanduser()
    missing = [name for name in MODEL_FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"model.path={text!r}: {folder} lacks {', '.join(missing)}; "
            "give a Hugging Face model folder or bundled:tiny (`rlmix train` alone fetches hf://)"
        )
    return folder
