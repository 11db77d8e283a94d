"""The scheduler's half of blending: which prompts are blended, and what is brought and encoded for them."""
