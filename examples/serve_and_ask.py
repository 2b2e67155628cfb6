# SPDX-License-Identifier: Apache-2.0
"""Serve a model, ask it with OpenAI's client: python examples/serve_and_ask.py [MODEL]"""

import subprocess
import sys

import httpx
from openai import OpenAI

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "One of the special magic numbers for soft-bell is: 2241461. "
QUESTION = "What is the special magic number for soft-bell mentioned in the provided text?"

# A hub id or a folder; without one, the small model that comes with kvfold.
name = sys.argv[1] if len(sys.argv) > 1 else "bundled"

# Port 0 is a free one. The server's first line has the address, once it is ready.
options = ["--port", "0", "--method", "kvzip", "--budget", "0.3"]
command = [sys.executable, "-m", "kvfold", "serve", name, *options]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        url = server.stdout.readline().split(" at ")[1].split(",")[0]

        # A document is compressed once ...
        document = {"text": NOISE * 12 + NEEDLE + NOISE * 12}
        made = httpx.post(f"{url}/contexts", json=document, timeout=600).raise_for_status()

        # ... and any client of OpenAI's API asks about it, by its id.
        client = OpenAI(base_url=url, api_key="none")
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            extra_body={"context_id": made.json()["id"]},
        )
        print(answer.choices[0].message.content)
    finally:
        server.terminate()
