"""Files that are whole or refused, and the way out to fp32."""
