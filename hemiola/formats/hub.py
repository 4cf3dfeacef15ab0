"""From what a user calls a model to a folder on disk: a local folder, or an id on the Hugging Face hub.

Downloads through huggingface_hub, which shows its progress bar, keeps its cache, and answers from it when offline.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download

from hemiola.errors import CheckpointError

NEEDED_FILES = ["*.safetensors", "*.json", "*.jinja"]
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def resolve(model: str, revision: str | None = None) -> Path:
    """The folder of a model. A folder that exists wins over a hub id of the same name.

    revision: branch, tag or commit on the hub; None is the default branch; of no meaning to a local folder.

    Raises: CheckpointError when there is no such folder and no such hub id, or when the hub cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            "no such model folder",
            found="a file" if folder.exists() else None,
            expected="a folder that exists, or a hub id like owner/name",
            where=model,
        )
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=NEEDED_FILES))
    except (OSError, ValueError) as error:  # huggingface_hub's errors are one or the other
        raise CheckpointError(
            "neither a local folder nor available from the hub",
            found=" ".join(str(error).split()).rstrip("."),
            where=model if revision is None else f"{model} at {revision}",
            remedy="Check the spelling, the network and the access rights, or give a local folder.",
        ) from error
