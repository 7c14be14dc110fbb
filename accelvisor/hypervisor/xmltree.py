"""A domain XML as a tree that loses nothing: hardened parser, namespaces by hand, exact serialiser.

The standard ElementTree reader drops comments and renames namespace prefixes, and it expands
entities that a document declares itself. A domain belongs to its operator, so what we do not
understand has to come out as it went in. Therefore expat runs without namespace processing (tags
and ``xmlns`` attributes stay as they were written), and any document type declaration is refused,
which takes entity bombs and external entities with it. Elements are plain ElementTree elements
whose tags keep their prefix; :func:`in_namespace` resolves prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, cast
from xml.etree import ElementTree as ET
from xml.parsers import expat

from accelvisor.errors import ConfigError
from accelvisor.limits import LIMITS

#: Nesting of elements; libvirt's own deepest documents stay below 20.
MAX_DEPTH = 128

#: An element, a comment or a processing instruction; the last two have a function for a tag.
Node: TypeAlias = "ET.Element[Any]"


@dataclass(slots=True)
class Document:
    """A parsed document; ``before`` and ``after`` are comments and such outside the root."""

    root: ET.Element
    before: list[Node] = field(default_factory=list)
    after: list[Node] = field(default_factory=list)

    def __str__(self) -> str:
        """The document as text, without an XML declaration; parsing it gives an equal tree."""
        parts: list[str] = []
        for node in self.before:
            _write(node, parts)
            parts.append("\n")
        _write(self.root, parts)
        parts.append("\n")
        for node in self.after:
            _write(node, parts)
            parts.append("\n")
        return "".join(parts)

    def bind(self, namespace: str, wanted: str) -> str:
        """A prefix that the root element binds to this namespace, binding it if there is none."""
        bound = _declared(self.root)
        for prefix, value in bound.items():
            if prefix and value == namespace:
                return prefix
        prefix = wanted
        while prefix in bound:
            prefix += "x"
        self.root.set(f"xmlns:{prefix}", namespace)
        return prefix


def parse(text: str | bytes, *, where: str = "domain-xml") -> Document:
    """Parse a document. ConfigError (``domain-xml``) when it is too large, malformed, too deep,
    or declares a document type.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(raw) > LIMITS.hook_xml_bytes:
        _refuse(where, f"the document has {len(raw)} bytes, the limit is {LIMITS.hook_xml_bytes}")
    reader = _Reader(where)
    # For a str the declared encoding means nothing any more: the bytes are ours, in UTF-8.
    parser = expat.ParserCreate("utf-8" if isinstance(text, str) else None)
    parser.buffer_text = True
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.CommentHandler = reader.comment
    parser.ProcessingInstructionHandler = reader.instruction
    parser.StartDoctypeDeclHandler = reader.doctype
    try:
        parser.Parse(raw, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        _refuse(where, f"not a well-formed XML document: {error}")
    return reader.document()


class _Reader:
    """Builds the tree from expat's calls."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._stack: list[ET.Element] = []
        self._root: ET.Element | None = None
        self._before: list[Node] = []
        self._after: list[Node] = []

    def document(self) -> Document:
        if self._root is None:
            _refuse(self._where, "not a well-formed XML document: no root element")
        return Document(self._root, self._before, self._after)

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self._stack) >= MAX_DEPTH:
            _refuse(self._where, f"elements nest deeper than {MAX_DEPTH}")
        element = ET.Element(tag, attributes)
        if self._stack:
            self._stack[-1].append(element)
        else:
            self._root = element
        self._stack.append(element)

    def end(self, _tag: str) -> None:
        self._stack.pop()

    def text(self, data: str) -> None:
        if not self._stack:
            return
        parent = self._stack[-1]
        if len(parent):
            parent[-1].tail = (parent[-1].tail or "") + data
        else:
            parent.text = (parent.text or "") + data

    def comment(self, data: str) -> None:
        self._other(ET.Comment(data))

    def instruction(self, target: str, data: str) -> None:
        self._other(ET.ProcessingInstruction(target, data))

    def doctype(self, *_: object) -> None:
        _refuse(self._where, "a document type declaration is not allowed in a domain XML")

    def _other(self, node: Node) -> None:
        if self._stack:
            self._stack[-1].append(cast(ET.Element, node))
        elif self._root is None:
            self._before.append(node)
        else:
            self._after.append(node)


def _refuse(where: str, message: str) -> NoReturn:
    raise ConfigError(
        message, code="domain-xml", where=where, hint="compare it with the output of virsh dumpxml"
    )


# --- namespaces ----------------------------------------------------------------------------------


def children(parent: ET.Element, name: str) -> Iterator[ET.Element]:
    """Direct children with this unprefixed name: libvirt's own elements."""
    return (child for child in parent if child.tag == name)


def child(parent: ET.Element, name: str) -> ET.Element | None:
    """The first direct child with this unprefixed name."""
    return next(children(parent, name), None)


def descend(root: ET.Element, path: str) -> Iterator[ET.Element]:
    """Elements at a path of unprefixed names, e.g. ``devices/controller``."""
    head, _, rest = path.partition("/")
    for element in children(root, head):
        if rest:
            yield from descend(element, rest)
        else:
            yield element


def in_namespace(
    parents: tuple[ET.Element, ...], namespace: str, name: str
) -> Iterator[ET.Element]:
    """Children of ``parents[-1]`` of that name in that namespace.

    ``parents`` is the chain from the root on: prefixes are resolved along it, since they stay as
    the author wrote them.
    """
    scope: dict[str, str] = {}
    for element in parents:
        scope.update(_declared(element))
    for element in parents[-1]:
        if not isinstance(element.tag, str):
            continue
        prefix, _, local = element.tag.rpartition(":")
        if local == name and (scope | _declared(element)).get(prefix, "") == namespace:
            yield element


def _declared(element: ET.Element) -> dict[str, str]:
    """Prefixes that an element itself binds; the default namespace is prefix ``""``."""
    found = {}
    for name, value in element.attrib.items():
        if name == "xmlns":
            found[""] = value
        elif name.startswith("xmlns:"):
            found[name[6:]] = value
    return found


# --- writing -------------------------------------------------------------------------------------


def append(parent: ET.Element, element: ET.Element, *, depth: int) -> None:
    """Append a child and indent it by two spaces a level, if the parent is indented at all.

    ``depth`` is the new element's own: 1 for a child of the root.
    """
    indent = "\n" + "  " * depth
    outer = "\n" + "  " * (depth - 1)
    if len(parent):
        last = parent[-1]
        if last.tail and last.tail.strip():
            element.tail = ""  # mixed content: white space would mean something
        else:
            last.tail, element.tail = indent, outer
    elif not (parent.text and parent.text.strip()):
        parent.text, element.tail = indent, outer
    parent.append(element)


def discard(parent: ET.Element, element: ET.Element) -> None:
    """Remove a child and the white space that set it apart; other text around it stays."""
    position = list(parent).index(element)
    last = position == len(parent) - 1
    tail = element.tail or ""
    parent.remove(element)
    if position:
        before = parent[position - 1]
        if tail.strip():
            before.tail = (before.tail or "") + tail
        elif last and not (before.tail or "").strip():
            before.tail = tail  # what indents the closing tag
    elif tail.strip():
        parent.text = (parent.text or "") + tail
    elif not len(parent) and not (parent.text or "").strip():
        parent.text = None


def is_empty(element: ET.Element) -> bool:
    """No children, no attributes but namespace declarations, no text: libvirt would drop it."""
    return (
        not len(element)
        and not (element.text or "").strip()
        and all(name.startswith("xmlns") for name in element.attrib)
    )


def _write(node: Node, parts: list[str]) -> None:
    if node.tag is ET.Comment:
        parts.append(f"<!--{node.text or ''}-->")
        return
    if node.tag is ET.ProcessingInstruction:
        parts.append(f"<?{node.text or ''}?>")
        return
    parts.append("<" + node.tag)
    parts.extend(f' {name}="{_attribute(value)}"' for name, value in node.attrib.items())
    if not len(node) and not node.text:
        parts.append("/>")
        return
    parts.append(">" + _text(node.text or ""))
    for element in node:
        _write(element, parts)
        parts.append(_text(element.tail or ""))
    parts.append(f"</{node.tag}>")


def _text(value: str) -> str:
    # A bare carriage return would come back as a line feed (XML 1.0, 2.11).
    escaped = value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("\r", "&#13;")


def _attribute(value: str) -> str:
    # White space other than blanks would come back as blanks (XML 1.0, 3.3.3).
    escaped = _text(value).replace('"', "&quot;")
    return escaped.replace("\n", "&#10;").replace("\t", "&#9;")
