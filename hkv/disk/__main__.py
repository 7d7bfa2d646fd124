"""`python -m hkv.disk check DIR` verifies every record; `list DIR` says what is there."""

import argparse
import sys
from collections import Counter

from hkv.disk import LocalStore


def main() -> int:
    """Runs the command; 1 where a record was damaged."""
    parser = argparse.ArgumentParser(prog="python -m hkv.disk", description=__doc__)
    parser.add_argument("command", choices=("check", "list"))
    parser.add_argument("directory")
    args = parser.parse_args()
    store = LocalStore(args.directory)
    damaged = 0
    if args.command == "check":
        for path, error in store.check():
            print(f"{path}: {error.problem.name}: {error.problem.value}")
            damaged += 1
    many = Counter(entry.name.part for entry in store.scan())
    for part, size in sorted(store.usage().items()):
        print(f"{part}: {many[part]:,} records, {size:,} bytes")
    if args.command == "check":
        print(f"{damaged} damaged" + (", moved aside" if damaged else ""))
    return int(damaged > 0)


if __name__ == "__main__":
    sys.exit(main())
