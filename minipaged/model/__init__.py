"""The Llama model on a flat ragged batch, and the paged attention that it reads its KV through (paper, section 4.1)."""
