#!/usr/bin/env bash
# Asks a running server with curl: a chat, a stream, scores of a prompt, token ids, and how the server is.
# Start `hiserve serve` and run `examples/curl.sh [URL]`.
set -euo pipefail
URL="${1:-http://127.0.0.1:8000}"

post() {
  curl --silent --show-error --fail-with-body --no-buffer "$URL$1" -H 'Content-Type: application/json' -d "$2"
  echo
}

echo "# a chat"
post /v1/chat/completions \
  '{"messages": [{"role": "user", "content": "I would like a small latte, please."}], "max_tokens": 32}'

echo "# the same as a stream"
post /v1/chat/completions \
  '{"messages": [{"role": "user", "content": "I would like a small latte, please."}], "max_tokens": 8, "stream": true}'

echo "# how likely a text is: its log-probabilities, and no new token"
post /v1/completions '{"prompt": "I would like a small latte", "echo": true, "logprobs": 1, "max_tokens": 0}'

echo "# the token ids of a text"
post /tokenize '{"prompt": "I would like a small latte"}'

echo "# how the server is"
curl --silent --show-error --fail-with-body "$URL/ready"
echo
