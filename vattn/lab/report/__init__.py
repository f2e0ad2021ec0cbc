"""A benchmark as one HTML page: charts, tables, conclusions; nothing is loaded from anywhere.

parts               what a section is made of             distributions    from measurements to what is drawn
bar_charts, distribution_charts, memory_charts, request_timeline           one function per chart
style               how runs are told apart               tables           every figure, without a script
page                all of it together; how it looks is said in vattn/lab/templates
"""
