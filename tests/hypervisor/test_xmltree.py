from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelvisor.errors import ConfigError
from accelvisor.hypervisor.xmltree import MAX_DEPTH, Document, append, discard, in_namespace, parse
from accelvisor.limits import LIMITS
from tests.hypervisor.samples import INSTALLER, READY, meaning

BOMB = """<!DOCTYPE d [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">
<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]><domain>&c;</domain>"""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "no xml",
        "<a>",
        "<a></b>",
        "<a/><b/>",
        "<a b='1' b='2'/>",
        "<a>&unknown;</a>",
        "<a>\x00</a>",
        "<a>\ud800</a>",
        b"\xff\xfe<\x00",
        b'<?xml version="1.0" encoding="no-such-one"?><a/>',
        BOMB,
        '<!DOCTYPE d SYSTEM "file:///etc/passwd"><domain/>',
        "<!DOCTYPE d><domain/>",
    ],
)
def test_what_is_no_plain_document_is_refused(text: str | bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.code == "domain-xml"
    assert caught.value.hint


def test_an_entity_bomb_is_refused_before_it_grows() -> None:
    levels = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 30))
    with pytest.raises(ConfigError, match="document type"):
        parse(f'<!DOCTYPE d [<!ENTITY l0 "x">{levels}]><d>&l29;</d>')


def test_a_document_above_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="limit"):
        parse("<a>" + " " * LIMITS.hook_xml_bytes + "</a>")


def test_nesting_has_a_limit_and_the_deepest_allowed_one_still_writes() -> None:
    deepest = "<a>" * MAX_DEPTH + "</a>" * MAX_DEPTH
    assert meaning(str(parse(deepest))) == meaning(deepest)
    with pytest.raises(ConfigError, match="deeper"):
        parse(f"<a>{deepest}</a>")


@pytest.mark.parametrize("xml", [INSTALLER, READY])
def test_a_domain_comes_out_as_it_went_in(xml: str) -> None:
    assert meaning(str(parse(xml))) == meaning(xml)


def test_comments_and_instructions_outside_the_root_stay() -> None:
    text = "<!-- by hand --><?keep me?><a/><!-- end -->"
    assert str(parse(text)).replace("\n", "") == text


def test_prefixes_stay_as_they_were_written() -> None:
    assert str(parse("<d xmlns:z='u:1'><z:x/></d>")).startswith('<d xmlns:z="u:1"><z:x/>')


def test_bytes_in_another_encoding_are_read_by_their_declaration() -> None:
    raw = '<?xml version="1.0" encoding="iso-8859-1"?><a>ä</a>'.encode("iso-8859-1")
    assert parse(raw).root.text == "ä"


def test_a_str_is_read_as_it_is_whatever_it_declares() -> None:
    assert parse('<?xml version="1.0" encoding="iso-8859-1"?><a>ä</a>').root.text == "ä"


@st.composite
def trees(draw: st.DrawFn) -> ET.Element:
    """Elements with awkward text, tails and attributes, prefixes bound at the root."""
    text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)
    awkward = st.one_of(st.none(), text, st.sampled_from(["\r", "\n\t", '"<&>', "]]>"]))
    names = st.sampled_from(["a", "b", "p:a", "q:b"])

    def element(depth: int) -> ET.Element:
        made = ET.Element(draw(names), {draw(names): draw(awkward) or ""})
        made.text, made.tail = draw(awkward), draw(awkward)
        for _ in range(draw(st.integers(0, 3)) if depth < 3 else 0):
            made.append(element(depth + 1))
        return made

    root = element(0)
    root.tail = None
    root.attrib |= {"xmlns:p": "urn:1", "xmlns:q": "urn:2"}
    return root


@given(trees())
def test_writing_and_parsing_gives_the_same_tree(root: ET.Element) -> None:
    again = parse(str(Document(root))).root

    def plain(element: ET.Element) -> object:
        children = [plain(child) for child in element]
        text, tail = element.text or "", element.tail or ""
        return element.tag, sorted(element.attrib.items()), text, tail, children

    assert plain(again) == plain(root)


@given(trees())
def test_another_parser_reads_the_same(root: ET.Element) -> None:
    text = str(Document(root))
    assert ET.canonicalize(text) == ET.canonicalize(str(parse(text)))


@given(trees(), st.integers(0, 3))
def test_appending_and_discarding_gives_the_same_tree(root: ET.Element, at: int) -> None:
    before = str(Document(root))
    parents = list(root.iter())
    parent = parents[min(at, len(parents) - 1)]
    added = ET.Element("new")
    append(parent, added, depth=1)
    discard(parent, added)
    assert meaning(str(Document(root))) == meaning(before)


def test_names_are_found_by_namespace_and_not_by_prefix() -> None:
    text = (
        "<d xmlns:a='urn:x'><a:y n='1'/><b:y n='2' xmlns:b='urn:x'/><y n='3' xmlns='urn:x'/>"
        "<a:y n='4' xmlns:a='urn:other'/><y n='5'/><a:z n='6'/></d>"
    )
    root = parse(text).root
    found = [element.get("n") for element in in_namespace((root,), "urn:x", "y")]
    assert found == ["1", "2", "3"]
