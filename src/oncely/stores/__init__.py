"""Where records live. Stores hold no rule."""
