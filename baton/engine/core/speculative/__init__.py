"""Draft tokens: who proposes them, and which of them count. No torch."""
