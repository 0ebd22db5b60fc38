"""How do other libraries' settings become ours?"""
