"""Proofs that what a command wrote is what its name says."""

import re
import xml.etree.ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"


def page(path):
    """The root of a well-formed page that loads nothing from elsewhere."""
    source = path.read_text()
    assert source.startswith("<!DOCTYPE html>\n")
    root = ET.fromstring(source.removeprefix("<!DOCTYPE html>"))
    tags = {e.tag.removeprefix(SVG) for e in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed"}
    assert not re.search(r"@import|url\(", source)
    assert set(re.findall(r"https?://[^\s\"<]+", source)) <= {"http://www.w3.org/2000/svg"}
    return root


def words(root):
    return " ".join(text.strip() for text in root.itertext() if text.strip())


def titles(root):
    """What the boxes, lines and dots of drawings say when pointed at."""
    return [e.text or "" for e in root.iter() if e.tag == f"{SVG}title"]


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
