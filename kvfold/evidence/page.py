# SPDX-License-Identifier: Apache-2.0
"""Pages of evidence: one HTML file each, with its styles, scripts and data, and no network access.

A wing's own parts are in its folder `template/`: `page.html` is what the page's body holds,
`page.css` its styles. Names of users are escaped, or embedded as data.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from matplotlib.figure import Figure


def page(
    wing: str,
    title: str,
    description: str,
    values: Mapping[str, str] | None = None,
    *,
    scripts: Sequence[str] = (),
    data: Any = None,
) -> str:
    """The page of a wing such as "report": its templates, filled with `values` that are HTML.

    `scripts` are names of its scripts, which read `data`.
    """
    script = "\n".join(template(wing, name) for name in scripts)
    body = filled(template(wing, "page.html"), values or {})
    return whole(title, description, template(wing, "page.css"), body, script=script, data=data)


def whole(
    title: str, description: str, style: str, body: str, *, script: str = "", data: Any = None
) -> str:
    """A page of these parts, whose policy allows its own style, script and pictures only."""
    policy = [f"default-src 'none'; style-src '{_hash(style)}'", "img-src data:"]
    policy += [f"script-src '{_hash(script)}'"] if script else []
    head = {
        "POLICY": "; ".join([*policy, "base-uri 'none'", "form-action 'none'"]),
        "DESCRIPTION": escape(description),
        "TITLE": escape(title),
        "STYLE": style,
    }
    end = f'<script type="application/json" id="data">{embedded(data)}</script>\n' if script else ""
    end += f"<script>{script}</script>\n" if script else ""
    return f"{filled(template('evidence', 'head.html'), head)}{body}{end}</body>\n</html>\n"


def template(wing: str, name: str) -> str:
    """The text of a wing's template."""
    return files(f"kvfold.{wing}").joinpath("template", name).read_text(encoding="utf-8")


def filled(text: str, values: Mapping[str, str]) -> str:
    """A template with each `@@NAME@@` replaced by its value."""
    parts = text.split("@@")
    return "".join(values[part] if number % 2 else part for number, part in enumerate(parts))


def embedded(data: Any) -> str:
    """JSON without the characters <, > and &, safe inside a `<script>` element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def table(kind: str, names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of the class `kind`; cells are HTML."""
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{one}</td>' for one in line)}</tr>" for line in lines)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def facts(of: Mapping[str, str]) -> str:
    """Terms and their texts, without those that are empty."""
    return "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in of.items() if text)


def picture(figure: Figure, says: str) -> str:
    """A figure as an image inside the page; `says` is its text."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    encoded = base64.b64encode(drawn.getvalue()).decode()
    return f'<figure><img alt="{escape(says)}" src="data:image/png;base64,{encoded}"></figure>'


def _hash(text: str) -> str:
    """A style or script by its hash, as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
