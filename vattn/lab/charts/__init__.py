"""Everything is drawn by matplotlib: SVG for pages, PNG for documents, the same colours in both.

palette   one colour per backend, kind of memory and phase of a request, light and dark
figure    an empty figure; a figure as SVG that follows the page's colours, or as PNG
"""
