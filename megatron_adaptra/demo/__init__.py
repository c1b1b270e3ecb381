"""Layer 6: `adaptra demo`: a real GPT in two arms, stock and adaptra."""
