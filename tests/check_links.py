"""python tests/check_links.py FOLDER: every internal link, anchor, picture and script of a rendered site leads somewhere; exit code 1 if not."""
import re
import sys
from pathlib import Path
from urllib.parse import unquote

LINK = re.compile(r"""\b(?:href|src)=["']([^"']*)["']""")
ANCHOR = re.compile(r"""\b(?:id|name)=["']([^"']+)["']""")


def broken_links(folder: Path) -> tuple[int, list[str]]:
    "(links looked at, what is wrong with some of them) over all pages below `folder`; addresses of other sites are not followed."
    pages = {p.resolve(): p.read_text(encoding="utf-8") for p in sorted(folder.rglob("*.html"))}
    anchors = {p: {unquote(a) for a in ANCHOR.findall(text)} for p, text in pages.items()}
    looked, bad = 0, []
    for page, text in pages.items():
        text = re.sub(r"<script\b.*?</script>", lambda m: m[0].split(">", 1)[0] + ">", text, flags=re.S)   # no links inside scripts
        for link in LINK.findall(text):
            if re.match(r"[a-z][a-z0-9+.-]*:|//", link, re.I) or not link: continue
            looked += 1
            name, _, anchor = link.partition("#")
            target = (page.parent/unquote(name.partition("?")[0])).resolve() if name else page
            if target.is_dir(): target = target/"index.html"
            if not target.is_file(): bad.append(f"{page.relative_to(folder.resolve())}: {link} leads nowhere")
            elif anchor and target in anchors and unquote(anchor) not in anchors[target]:
                bad.append(f"{page.relative_to(folder.resolve())}: {link}: no such place on that page")
    return looked, bad


if __name__ == "__main__":
    looked, bad = broken_links(Path(sys.argv[1]))
    print("\n".join([*bad, f"{looked} links, {len(bad)} broken"]))
    sys.exit(bool(bad) or not looked)
