"""What a document says, whatever it looks like: a hash that comments, blank lines, quotes and indentation leave alone.

The tree of a document is written as JSON without spaces: a mapping as `["m", key, value, ..]` in the order written, a
list as `["l", item, ..]`, a text as itself, and what was written without quotes and reads as a number, a flag or null
as `["s", text]`, so that `8` and `"8"` differ. The hash is the SHA-256 of that.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from hetplan.specs.nodes import ListNode, MapNode, Node
from hetplan.specs.scalars import is_special


def content_sha256(root: Node) -> str:
    """Return the hash of what a document says, as hexadecimal digits."""
    text = json.dumps(_written(root), ensure_ascii=True, separators=(",", ":"))
    return sha256(text.encode("ascii")).hexdigest()


def _written(node: Node) -> Any:
    """Return a node in the form that is hashed; nesting is bounded by the reader."""
    if isinstance(node, MapNode):
        return ["m", *(part for key, (_, value) in node.entries.items() for part in (key, _written(value)))]
    if isinstance(node, ListNode):
        return ["l", *map(_written, node.items)]
    return ["s", node.text] if is_special(node) else node.text
