"""A benchmark as one HTML page: charts, tables, conclusions; nothing is loaded from anywhere.

read      the JSON, checked                     series   fewer points, shares, histograms
style     one colour per backend and kind       svg      axes and marks
charts    lines, bars, distributions            memory, requests, page_raster: the larger drawings
tables    every figure, without a script        page     all of it together
"""
